// Vercel's AI SDK with its provider for OpenAI-compatible servers. Prints what it saw as JSON.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const { BASE_URL, MODEL } = process.env;
const provider = createOpenAICompatible({
  name: 'llmserve',
  baseURL: `${BASE_URL}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const ask = { model, prompt: 'Name a river.', temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const schema = z.object({ color: z.enum(['red', 'green']), size: z.literal(3) });

const whole = await generateText(ask);

let streamed = '';
const stream = streamText(ask);
for await (const text of stream.textStream) streamed += text;

const object = await generateObject({ ...ask, schema, maxOutputTokens: 100 });
const objects = streamObject({ ...ask, schema, maxOutputTokens: 100 });
for await (const _ of objects.partialObjectStream);

const tools = {
  set_lamp: tool({
    description: 'Sets the lamp.',
    inputSchema: z.object({ level: z.literal(50) }),
    execute: async ({ level }) => `the lamp is at ${level}`,
  }),
};
const toolChoice = { type: 'tool', toolName: 'set_lamp' };
const callAsk = { ...ask, tools, toolChoice, maxOutputTokens: 200 };
const called = await generateText(callAsk);
const streamedCall = streamText(callAsk);
const parts = [];
for await (const part of streamedCall.fullStream) parts.push(part.type);

console.log(
  JSON.stringify({
    whole: whole.text,
    usage: whole.usage,
    streamed,
    streamedUsage: await stream.usage,
    object: object.object,
    streamedObject: await objects.object,
    call: { name: called.toolCalls[0].toolName, input: called.toolCalls[0].input },
    result: called.toolResults[0].output,
    streamedCall: (await streamedCall.toolCalls)[0].input,
    parts,
  }),
);
