// SPDX-License-Identifier: Apache-2.0
// Attributes of a node: ONNX Runtime has one set of calls for them when a kernel is created, another when shapes are
// inferred.
#ifndef STOF_PLUGINS_ORT_ATTRIBUTES_H_
#define STOF_PLUGINS_ORT_ATTRIBUTES_H_

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"

namespace stof::ort {

class KernelAttributes final : public AttributeReader {
 public:
  KernelAttributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  bool Int(const char* name, int64_t* value) const override;
  bool Float(const char* name, float* value) const override;
  bool String(const char* name, std::string* value) const override;
  bool Ints(const char* name, std::vector<int64_t>* value) const override;

 private:
  template <typename Getter>
  bool Get(const char* name, AttributeType type, Getter get) const;
  std::string Message(OrtStatus* status) const;

  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

class InferAttributes final : public AttributeReader {
 public:
  InferAttributes(const OrtApi* api, const OrtShapeInferContext* context) : api_(api), context_(context) {}
  bool Int(const char* name, int64_t* value) const override;
  bool Float(const char* name, float* value) const override;
  bool String(const char* name, std::string* value) const override;
  bool Ints(const char* name, std::vector<int64_t>* value) const override;

 private:
  bool Read(const char* name, OrtOpAttrType type, void* value, size_t size) const;

  const OrtApi* api_;
  const OrtShapeInferContext* context_;
};

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_ATTRIBUTES_H_
