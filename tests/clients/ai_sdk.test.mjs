// Vercel's `ai` with `@ai-sdk/openai-compatible`, against the server at OCTAVO_URL.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

const { OCTAVO_URL: url, OCTAVO_KEY: key, OCTAVO_MODEL: name, OCTAVO_REASONED: reasoned } = process.env;
const provider = createOpenAICompatible({
  name: "octavo",
  baseURL: `${url}/v1`,
  apiKey: key,
  includeUsage: true,
});
const model = provider(name);
const prompt = "Name three fruits.";
const settings = { temperature: 0, maxRetries: 0 };

test("a chat and its stream are the same", async () => {
  const whole = await generateText({ model, prompt, maxOutputTokens: 24, ...settings });
  const stream = streamText({ model, prompt, maxOutputTokens: 24, ...settings });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, whole.text);
  assert.ok(text);
  const usage = await stream.usage;
  assert.equal(usage.outputTokens, whole.usage.outputTokens);
  assert.ok(usage.inputTokenDetails.cacheReadTokens > 0);
  assert.equal(await stream.finishReason, whole.finishReason);
});

test("reasoning is apart", async () => {
  const messages = JSON.parse(reasoned);
  const whole = await generateText({ model, messages, maxOutputTokens: 60, ...settings });
  const stream = streamText({ model, messages, maxOutputTokens: 60, ...settings });
  await stream.consumeStream();
  assert.ok(whole.reasoningText);
  assert.equal(await stream.reasoningText, whole.reasoningText);
  assert.equal(await stream.text, whole.text);
  assert.doesNotMatch(whole.reasoningText + whole.text, /think>/);
});

test("text completions", async () => {
  const answer = await generateText({
    model: provider.completionModel(name),
    prompt: "Once upon a time",
    maxOutputTokens: 8,
    ...settings,
  });
  assert.ok(answer.text);
});

test("mistakes are its own exceptions", async () => {
  await assert.rejects(generateText({ model, prompt, ...settings, temperature: 3 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature must be/);
    return true;
  });
  await assert.rejects(generateText({ model: provider("other"), prompt, ...settings }), (error) => error.statusCode === 404);
});
