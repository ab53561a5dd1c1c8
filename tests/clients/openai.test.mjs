// The `openai` package of npm, against the server at OCTAVO_URL.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const { OCTAVO_URL: url, OCTAVO_KEY: key, OCTAVO_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Name three fruits." }];

test("models", async () => {
  const page = await client.models.list();
  assert.deepEqual(page.data.map((card) => card.id), [model]);
});

test("a chat and its stream are the same", async () => {
  const fields = { model, messages, max_completion_tokens: 24, temperature: 0 };
  const whole = await client.chat.completions.create(fields);
  const stream = await client.chat.completions.create({
    ...fields,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let last;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(whole._request_id);
});

test("the package can put a stream together", async () => {
  const runner = client.chat.completions.stream({ model, messages, max_tokens: 8, temperature: 0 });
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].finish_reason, "length");
  assert.equal(await runner.finalContent(), final.choices[0].message.content);
});

test("token ids are prompts", async () => {
  const answer = await client.completions.create({ model, prompt: [[504, 338], [504]], max_tokens: 2, echo: true });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
});

test("mistakes are its own exceptions", async () => {
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: 3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
  const stranger = client.withOptions({ apiKey: "wrong" });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
});

test("a stream can be left", async () => {
  const stream = await client.completions.create(
    { model, prompt: "x", max_tokens: 1500, stream: true, ignore_eos: true },
  );
  for await (const _ of stream) {
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});
