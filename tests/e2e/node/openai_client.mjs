// OpenAI's own client: chat, streams, tools, responses, errors. Prints what it saw as JSON.
import OpenAI from 'openai';

const { BASE_URL, MODEL } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: 'none', maxRetries: 0 });
const ask = {
  model: MODEL,
  messages: [{ role: 'user', content: 'Name a river.' }],
  max_tokens: 12,
  temperature: 0,
};

const whole = await client.chat.completions.create(ask);

let streamed = '';
let usage = null;
const chunks = await client.chat.completions.create({
  ...ask,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of chunks) {
  streamed += chunk.choices[0]?.delta?.content ?? '';
  usage = chunk.usage ?? usage;
}

const tools = [
  {
    type: 'function',
    function: {
      name: 'set_lamp',
      parameters: {
        type: 'object',
        properties: { level: { type: 'integer', enum: [0, 50, 100] } },
        required: ['level'],
        additionalProperties: false,
      },
      strict: true,
    },
  },
];
const called = client.chat.completions.stream({
  ...ask,
  max_tokens: 200,
  tools,
  tool_choice: 'required',
  parallel_tool_calls: false,
});
const call = (await called.finalChatCompletion()).choices[0].message.tool_calls[0].function;

let responseText = '';
const kinds = [];
const events = await client.responses.create({
  model: MODEL,
  input: 'Name a river.',
  max_output_tokens: 12,
  temperature: 0,
  stream: true,
});
for await (const event of events) {
  kinds.push(event.type);
  if (event.type === 'response.output_text.delta') responseText += event.delta;
}

let status = 0;
try {
  await client.chat.completions.create({ ...ask, model: 'none-such' });
} catch (error) {
  status = error instanceof OpenAI.NotFoundError ? error.status : -1;
}

let seen = 0;
const left = await client.chat.completions.create({ ...ask, max_tokens: 1000, stream: true });
for await (const chunk of left) {
  if (++seen === 3) break;
}

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    usage,
    call: { name: call.name, arguments: JSON.parse(call.arguments) },
    response: responseText,
    firstEvent: kinds[0],
    lastEvent: kinds.at(-1),
    status,
    seen,
  }),
);
