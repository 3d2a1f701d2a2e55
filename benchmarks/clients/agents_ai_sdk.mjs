// The AI SDK against benchmarks/clients/scripted.py: node agents_ai_sdk.mjs ADDRESS
// Prints what each provider's model said after its tool call, whole and streamed, and an object.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: 'none' });
const compatible = createOpenAICompatible({ name: 'gateway', baseURL, supportsStructuredOutputs: true });
const models = [
  compatible('scripted'),
  openai.chat('scripted'),
  openai.responses('scripted'),
  createAnthropic({ baseURL, apiKey: 'none' })('scripted'),
];
const temperature = tool({
  description: 'The temperature of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `20 C in ${city}`,
});
const question = { tools: { temperature }, prompt: 'How warm is it?', stopWhen: stepCountIs(3) };
const schema = z.object({ city: z.string(), degrees: z.int() });
const texts = new Set();
for (const model of models) {
  texts.add((await generateText({ model, ...question })).text);
  let text = '';
  const fail = ({ error }) => { throw error; };
  for await (const delta of streamText({ model, ...question, onError: fail }).textStream) text += delta;
  texts.add(text);
  const { object } = await generateObject({ model, schema, prompt: question.prompt });
  if (object.city !== 'Rome' || object.degrees !== 20) throw new Error(JSON.stringify(object));
}
console.log([...texts].join('; '));
