// SPDX-License-Identifier: Apache-2.0
// Runs a text encoder and its optimized file in ONNX Runtime's C++ API, and compares the first output of both.
//   run_model model.onnx model.stof.onnx libstof_ort.so [LENGTH]
// Status: 0 where they agree, 1 where they differ, 2 after an error.
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

namespace {

/// The model's first output for token ids and an attention mask, each [1, length] in int64.
std::vector<float> run(const Ort::Env& env, const char* model, const char* library, std::vector<int64_t>& ids) {
  Ort::SessionOptions options;
  options.RegisterCustomOpsLibrary(library);  // all that stof needs: once for the options of each session
  Ort::Session session(env, model, options);

  std::vector<int64_t> mask(ids.size(), 1);
  const std::vector<int64_t> shape = {1, static_cast<int64_t>(ids.size())};
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<Ort::Value> inputs;
  for (auto* values : {&ids, &mask}) {
    inputs.push_back(
        Ort::Value::CreateTensor<int64_t>(memory, values->data(), values->size(), shape.data(), shape.size()));
  }
  const char* input_names[] = {"input_ids", "attention_mask"};
  const auto output_name = session.GetOutputNameAllocated(0, Ort::AllocatorWithDefaultOptions());
  const char* output_names[] = {output_name.get()};

  const auto began = std::chrono::steady_clock::now();
  const auto outputs = session.Run(Ort::RunOptions(), input_names, inputs.data(), inputs.size(), output_names, 1);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
  const float* first = outputs[0].GetTensorData<float>();
  const size_t count = outputs[0].GetTensorTypeAndShapeInfo().GetElementCount();
  std::printf("%s: %zu values in %.2f ms\n", model, count, took.count());
  return {first, first + count};
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::fprintf(stderr, "usage: run_model model.onnx model.stof.onnx libstof_ort.so [LENGTH]\n");
    return 2;
  }
  std::vector<int64_t> ids(argc > 4 ? std::max(1, std::atoi(argv[4])) : 64);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(37 * i % 50);
  const Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "run_model");
  const auto expected = run(env, argv[1], argv[3], ids), found = run(env, argv[2], argv[3], ids);

  float worst = 0, largest = 0;
  for (size_t i = 0; i < expected.size() && i < found.size(); ++i) {
    worst = std::max(worst, std::fabs(found[i] - expected[i]));
    largest = std::max(largest, std::fabs(expected[i]));
  }
  std::printf("largest difference %.1e, largest value %.2f\n", worst, largest);
  return found.size() == expected.size() && worst <= 1e-4f * largest ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "run_model: %s\n", error.what());
  return 2;
}
