// SPDX-License-Identifier: Apache-2.0
// Runs a text encoder and its optimized file in onnxruntime-node, and compares the first output of both at real tokens.
//   node run_model.mjs model.onnx model.stof.onnx
// onnxruntime-node cannot register a library: stof's operators run by their function bodies. Status: 0 where the outputs agree.
import ort from 'onnxruntime-node';

const BATCH = 2, LENGTH = 16, REAL = 6; // the second text has padding behind so many tokens

async function run(path) {
  const session = await ort.InferenceSession.create(path, {executionProviders: ['cpu']});
  const ids = BigInt64Array.from({length: BATCH * LENGTH}, (_, i) => BigInt(5 + (7 * i) % 50));
  const mask = new BigInt64Array(BATCH * LENGTH).fill(1n).fill(0n, LENGTH + REAL);
  const given = {input_ids: ids, attention_mask: mask, token_type_ids: new BigInt64Array(BATCH * LENGTH)};
  const feeds = Object.fromEntries(
      session.inputNames.map((name) => [name, new ort.Tensor('int64', given[name], [BATCH, LENGTH])]));
  return (await session.run(feeds))[session.outputNames[0]];
}

const [original, optimized] = process.argv.slice(2);
const expected = await run(original), found = await run(optimized);
const width = expected.dims.length === 3 ? expected.dims[2] * (LENGTH + REAL) : expected.data.length;
let worst = 0, largest = 0;
for (let i = 0; i < width; i++) {
  worst = Math.max(worst, Math.abs(found.data[i] - expected.data[i]));
  largest = Math.max(largest, Math.abs(expected.data[i]));
}
console.log(`${width} values, largest difference ${worst.toExponential(1)}, largest value ${largest.toFixed(2)}`);
process.exitCode = found.dims.join() === expected.dims.join() && worst <= 1e-4 * largest ? 0 : 1;
