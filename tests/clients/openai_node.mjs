// The `openai` package of npm against a running server: node openai_node.mjs URL MODEL
import OpenAI from "openai";
import assert from "node:assert/strict";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };

const answer = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
assert.equal(answer.usage.completion_tokens, 8);

let text = "";
const stream = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, answer.choices[0].message.content);

const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const runner = client.chat.completions.stream({
  model, messages, tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0, max_tokens: 200,
});
const final = await runner.finalChatCompletion();
assert.ok(["Paris", "Rome"].includes(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments).city));

const response = await client.responses.create({ model, input: "Say hi", max_output_tokens: 8, temperature: 0 });
assert.ok(response.output_text.length > 0);

await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError);

const running = async () => (await (await fetch(`${url}/load`)).json()).running;
const long = await client.chat.completions.create({ model, messages, max_tokens: 1500, stream: true, ignore_eos: true });
let count = 0;
try {
  for await (const _ of long) if (++count === 3) long.controller.abort();
} catch (error) {
  assert.equal(error.name, "AbortError");
}
const start = Date.now();
while ((await running()) > 0) {
  assert.ok(Date.now() - start < 1000, "a client that left still holds its request after a second");
  await new Promise((done) => setTimeout(done, 20));
}
console.log("openai-node: ok");
