// SPDX-License-Identifier: Apache-2.0
// run_on_windows.exe ONNXRUNTIME_DLL STOF_ORT_DLL CASE..: runs the cases of make_cases.py in ONNX Runtime with stof's
// operators, compares outputs, and calls the C ABI. Ends with 1 and a message where something is wrong.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

// ONNX Runtime's header takes this annotation for one that every compiler of Windows has.
#define _Return_type_success_(condition)
#include "onnxruntime_c_api.h"
#include "plugins/core/c_api/c_api.h"

// Of windows.h, whose annotations are the names of macros of ONNX Runtime's header.
extern "C" {
__declspec(dllimport) void* __stdcall LoadLibraryA(const char* path);
__declspec(dllimport) void* __stdcall GetProcAddress(void* library, const char* name);
__declspec(dllimport) unsigned long __stdcall GetLastError();
}

namespace {

// An order of magnitude above what fp32 sums in another order differ by; a wrong kernel is off by more.
constexpr double kTolerance = 2e-5;
const OrtApi* ort = nullptr;

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "run_on_windows: %s\n", message.c_str());
  std::exit(1);
}

void Check(OrtStatus* status) {
  if (status != nullptr) Fail(ort->GetErrorMessage(status));
}

std::wstring Wide(const std::string& text) { return std::wstring(text.begin(), text.end()); }

template <typename Function>
Function Find(void* library, const char* name) {
  void* found = GetProcAddress(library, name);
  if (found == nullptr) Fail(std::string("the library exports no ") + name);
  return reinterpret_cast<Function>(found);
}

void* Load(const char* path) {
  void* library = LoadLibraryA(path);
  if (library == nullptr) Fail(std::string(path) + " does not load: error " + std::to_string(GetLastError()));
  return library;
}

struct Tensor {
  std::string role, name, type;
  std::vector<int64_t> dims;
  std::vector<char> bytes;
};

std::vector<Tensor> ReadCase(const std::string& folder) {
  std::ifstream list(folder + "/case.txt");
  std::vector<Tensor> tensors;
  for (std::string line; std::getline(list, line);) {
    std::istringstream words(line);
    Tensor tensor;
    words >> tensor.role >> tensor.name >> tensor.type;
    size_t bytes = tensor.type == "f32" ? 4 : 8;
    for (int64_t dim; words >> dim;) {
      tensor.dims.push_back(dim);
      bytes *= static_cast<size_t>(dim);
    }
    std::ifstream file(folder + "/" + tensor.name + ".bin", std::ios::binary);
    tensor.bytes.assign(std::istreambuf_iterator<char>(file), {});
    if (tensor.bytes.size() != bytes) Fail(folder + ": " + tensor.name + ".bin is not as large as case.txt says");
    tensors.push_back(std::move(tensor));
  }
  if (tensors.empty()) Fail(folder + " has no case.txt");
  return tensors;
}

void RunCase(OrtEnv* env, const char* library, const std::string& folder) {
  std::vector<Tensor> tensors = ReadCase(folder);
  OrtSessionOptions* options = nullptr;
  Check(ort->CreateSessionOptions(&options));
  Check(ort->RegisterCustomOpsLibrary_V2(options, Wide(library).c_str()));
  OrtSession* session = nullptr;
  Check(ort->CreateSession(env, Wide(folder + "/model.onnx").c_str(), options, &session));
  OrtMemoryInfo* memory = nullptr;
  Check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  std::vector<const char*> names[2];
  std::vector<OrtValue*> inputs;
  std::vector<const Tensor*> expected;
  for (Tensor& tensor : tensors) {
    const bool is_output = tensor.role == "output";
    names[is_output].push_back(tensor.name.c_str());
    if (is_output) {
      expected.push_back(&tensor);
      continue;
    }
    inputs.push_back(nullptr);
    Check(ort->CreateTensorWithDataAsOrtValue(
        memory, tensor.bytes.data(), tensor.bytes.size(), tensor.dims.data(), tensor.dims.size(),
        tensor.type == "f32" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        &inputs.back()));
  }
  std::vector<OrtValue*> outputs(expected.size());
  Check(ort->Run(session, nullptr, names[0].data(), inputs.data(), inputs.size(), names[1].data(), outputs.size(),
                 outputs.data()));
  double worst = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    Check(ort->GetTensorTypeAndShape(outputs[i], &info));
    size_t count = 0;
    Check(ort->GetTensorShapeElementCount(info, &count));
    ort->ReleaseTensorTypeAndShapeInfo(info);
    if (count * 4 != expected[i]->bytes.size()) Fail(expected[i]->name + " has another size than expected");
    float* found = nullptr;
    Check(ort->GetTensorMutableData(outputs[i], reinterpret_cast<void**>(&found)));
    const auto* wanted = reinterpret_cast<const float*>(expected[i]->bytes.data());
    for (size_t j = 0; j < count; ++j) {
      const double error = std::fabs(static_cast<double>(found[j]) - wanted[j]);
      if (!(error <= kTolerance)) {
        Fail(expected[i]->name + "[" + std::to_string(j) + "] is " + std::to_string(found[j]) + ", expected " +
             std::to_string(wanted[j]));
      }
      worst = std::fmax(worst, error);
    }
    ort->ReleaseValue(outputs[i]);
  }
  for (OrtValue* input : inputs) ort->ReleaseValue(input);
  ort->ReleaseMemoryInfo(memory);
  ort->ReleaseSession(session);
  ort->ReleaseSessionOptions(options);
  std::printf("%s: ran, worst difference %.3g\n", folder.c_str(), worst);
}

// Softmax over k <= q of zeros: the mean of the values up to q. And the mask itself.
void CallCApi(void* library) {
  std::printf("%s\n", Find<decltype(&stof_build_info)>(library, "stof_build_info")());
  char error[1024] = "";
  stof_mask* mask = nullptr;
  if (Find<decltype(&stof_mask_create)>(library, "stof_mask_create")("k <= q", nullptr, 0, &mask, error,
                                                                     sizeof(error)) != 0) {
    Fail(error);
  }
  constexpr int kLength = 150;
  const stof_sizes sizes = {1, 1, kLength, kLength, 0};
  std::vector<uint8_t> allowed(kLength * kLength);
  if (Find<decltype(&stof_mask_eval)>(library, "stof_mask_eval")(mask, &sizes, nullptr, 0, allowed.data(), error,
                                                                 sizeof(error)) != 0) {
    Fail(error);
  }
  for (int q = 0; q < kLength; ++q) {
    for (int k = 0; k < kLength; ++k) {
      if (allowed[q * kLength + k] != (k <= q)) Fail("stof_mask_eval: another answer than k <= q");
    }
  }
  Find<decltype(&stof_mask_destroy)>(library, "stof_mask_destroy")(mask);

  const stof_attribute attribute = {"mask", 2, 0, 0, "k <= q"};  // a string
  stof_op* op = nullptr;
  if (Find<decltype(&stof_op_create)>(library, "stof_op_create")("StofAttention", &attribute, 1, &op, error,
                                                                 sizeof(error)) != 0) {
    Fail(error);
  }
  constexpr int kHead = 8;
  std::vector<float> zeros(kLength * kHead), values(kLength * kHead), out(kLength * kHead);
  for (int i = 0; i < kLength * kHead; ++i) values[i] = static_cast<float>(i * 7 % 11 - 5);
  const auto tensor = [](std::vector<float>& data) { return stof_tensor{data.data(), 1, 4, {1, 1, kLength, kHead}}; };
  const stof_tensor inputs[] = {tensor(zeros), tensor(zeros), tensor(values)};
  stof_tensor output = tensor(out);
  for (int threads : {1, 3}) {
    if (Find<decltype(&stof_op_run)>(library, "stof_op_run")(op, inputs, 3, &output, 1, threads, error,
                                                             sizeof(error)) != 0) {
      Fail(error);
    }
    std::vector<double> sums(kHead);
    for (int i = 0; i < kLength * kHead; ++i) {
      sums[i % kHead] += values[i];
      if (!(std::fabs(out[i] - sums[i % kHead] / (i / kHead + 1)) <= kTolerance)) Fail("stof_op_run: wrong attention");
    }
  }
  Find<decltype(&stof_op_destroy)>(library, "stof_op_destroy")(op);
  std::printf("C ABI: mask and attention are right\n");
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) Fail("usage: run_on_windows.exe ONNXRUNTIME_DLL STOF_ORT_DLL CASE..");
  void* runtime = Load(arguments[1]);
  void* library = Load(arguments[2]);
  CallCApi(library);
  // A thread that ends destroys its own workers, under a lock of the system that a worker needs to end.
  std::thread([library] { CallCApi(library); }).join();
  std::printf("C ABI: a thread with workers of its own ended\n");
  const OrtApiBase* base = Find<const OrtApiBase* (*)()>(runtime, "OrtGetApiBase")();
  ort = base->GetApi(18);
  if (ort == nullptr) Fail("the runtime is older than 1.18");
  OrtEnv* env = nullptr;
  Check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "stof", &env));
  for (int i = 3; i < count; ++i) RunCase(env, arguments[2], arguments[i]);
  ort->ReleaseEnv(env);
  std::printf("ONNX Runtime %s: all cases ran, outputs are the same\n", base->GetVersionString());
  return 0;
}
