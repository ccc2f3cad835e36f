"""The API's own description: GET /openapi.json, and GET /docs, which shows it in a browser."""
