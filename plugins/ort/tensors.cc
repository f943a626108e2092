// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/tensors.h"

#include <string>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/ort/errors.h"

namespace stof::ort {

OrtStatus* Describe(const OrtApi* api, const OrtTensorTypeAndShapeInfo* info, Tensor* tensor) {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  size_t rank = 0;
  STOF_ORT_RETURN(api->GetTensorElementType(info, &type));
  STOF_ORT_RETURN(api->GetDimensionsCount(info, &rank));
  if (rank > kMaxRank) {
    return api->CreateStatus(ORT_INVALID_ARGUMENT,
                             ("has rank " + std::to_string(rank) + ", expected 8 or less").c_str());
  }
  tensor->dtype = static_cast<DType>(type);  // both follow onnx.TensorProto.DataType
  tensor->rank = static_cast<int32_t>(rank);
  return api->GetDimensions(info, tensor->dims, rank);
}

OrtStatus* FromValue(const OrtApi* api, const OrtValue* value, Tensor* tensor) {
  *tensor = Tensor();
  if (value == nullptr) return nullptr;  // an input left out: dtype stays undefined
  int is_tensor = 0;
  STOF_ORT_RETURN(api->IsTensor(value, &is_tensor));
  if (is_tensor == 0) return api->CreateStatus(ORT_INVALID_ARGUMENT, "is a sequence or a map, expected a tensor");
  OrtTensorTypeAndShapeInfo* info = nullptr;
  STOF_ORT_RETURN(api->GetTensorTypeAndShape(value, &info));
  OrtStatus* status = Describe(api, info, tensor);
  api->ReleaseTensorTypeAndShapeInfo(info);
  STOF_ORT_RETURN(status);
  return api->GetTensorMutableData(const_cast<OrtValue*>(value), &tensor->data);
}

OrtStatus* OnDevice(const OrtApi* api, const OrtValue* value, bool* on_device) {
  const OrtMemoryInfo* memory = nullptr;
  OrtMemoryInfoDeviceType type = OrtMemoryInfoDeviceType_CPU;
  STOF_ORT_RETURN(api->GetTensorMemoryInfo(value, &memory));
  api->MemoryInfoGetDeviceType(memory, &type);
  *on_device = type == OrtMemoryInfoDeviceType_GPU;
  return nullptr;
}

Status ToHost(Tensor* tensor, std::vector<char>* copy) {
  const CudaBackend* backend = FindCudaBackend();
  const bool read = tensor->dtype == DType::kBool || tensor->dtype == DType::kU8 || tensor->dtype == DType::kI8 ||
                    tensor->dtype == DType::kI32 || tensor->dtype == DType::kI64;
  const int64_t bytes = read ? tensor->Elements() * SizeOf(tensor->dtype) : 0;
  if (backend == nullptr || bytes == 0) {
    *tensor = Tensor();
    return Status();
  }
  copy->resize(static_cast<size_t>(bytes));
  STOF_RETURN_IF_ERROR(backend->copy_to_host(tensor->data, copy->size(), copy->data()));
  tensor->data = copy->data();
  return Status();
}

}  // namespace stof::ort
