// The openai package of npm: answer, stream, tools, responses. Arguments: base address, model.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const check = (holds, words) => {
  if (!holds) throw new Error(words);
};
const fields = {
  model,
  messages: [{ role: "user", content: "What is the weather?" }],
  temperature: 0,
  max_tokens: 8,
  thinking: { type: "disabled" },
};
const whole = await client.chat.completions.create(fields);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...fields, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
check(text === whole.choices[0].message.content, `streamed ${text}`);
const parameters = {
  type: "object",
  properties: { windy: { type: "boolean" } },
  required: ["windy"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "f", strict: true, parameters } }];
const forced = await client.chat.completions.create({ ...fields, max_tokens: 64, tools, tool_choice: "required" });
const [call] = forced.choices[0].message.tool_calls;
check(typeof JSON.parse(call.function.arguments).windy === "boolean", call.function.arguments);
const response = await client.responses.create({ model, input: "hi", max_output_tokens: 8, reasoning: { effort: "none" } });
check(response.usage.output_tokens <= 8, "too many tokens");
let refused = false;
try {
  await client.chat.completions.create({ ...fields, temperature: 7 });
} catch (error) {
  refused = error instanceof OpenAI.BadRequestError;
}
check(refused, "a bad temperature was taken");
console.log("openai of npm: answer, stream, forced call, response, error");
