// SPDX-License-Identifier: Apache-2.0
// Checks KV caches: which buffers are one, for StofCachedAttention and StofPagedAttention, and the scales of quantized
// caches.
#include <cstdint>
#include <string>

#include "plugins/core/ops/cached_attention/cached_attention.h"

namespace stof {

bool Overlap(const Tensor& first, const Tensor& second) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
  const auto bytes = [](const Tensor& t) { return static_cast<uintptr_t>(t.Elements() * SizeOf(t.dtype)); };
  if (bytes(first) == 0 || bytes(second) == 0) return false;
  return begin(first) < begin(second) + bytes(second) && begin(second) < begin(first) + bytes(first);
}

namespace {

// [G * D], [G, D], [G, 1, D] or [1, G, 1, D].
bool IsPerChannel(const Tensor& scale, int64_t G, int64_t D) {
  const int64_t* dims = scale.dims;
  switch (scale.rank) {
    case 1:
      return dims[0] == G * D;
    case 2:
      return dims[0] == G && dims[1] == D;
    case 3:
      return dims[0] == G && dims[1] == 1 && dims[2] == D;
    case 4:
      return dims[0] == 1 && dims[1] == G && dims[2] == 1 && dims[3] == D;
    default:
      return false;
  }
}

Status Bind(const char* name, const Tensor* found, const CacheAppendArgs& args, KvScale* scale) {
  if (!IsQuantized(CacheType(args))) {
    if (found == nullptr) return Status();
    return Status::Error(std::string(name) + " is given, expected none: the caches have the type of query, " +
                         TypeText(args.dtype) + ", and are not quantized");
  }
  if (found == nullptr) {
    return Status::Error(std::string(name) + " is missing, expected it beside caches of data type " +
                         TypeText(args.cache_dtype));
  }
  const bool is_one = found->rank <= 4 && found->Elements() == 1;
  if (found->dtype != DType::kF32 || (!is_one && !IsPerChannel(*found, args.G, args.D))) {
    const std::string G = std::to_string(args.G), D = std::to_string(args.D);
    return Status::Error(std::string(name) + " has shape " + ShapeText(*found) + " and data type " +
                         TypeText(found->dtype) + ", expected fp32 and one element, or [1, " + G + ", 1, " + D +
                         "] or [" + std::to_string(args.G * args.D) + "], one for each channel");
  }
  scale->data = static_cast<const float*>(found->data);
  scale->stride_g = is_one ? 0 : args.D;
  scale->stride_d = is_one ? 0 : 1;
  return Status();
}

}  // namespace

Status CheckCacheBuffers(const Tensor* past, const Tensor* present, const CacheNames& names) {
  if (Overlap(present[0], present[1])) {
    return Status::Error(std::string(names.present[0]) + " and " + names.present[1] +
                         " overlap in memory, expected a buffer each");
  }
  if (past == nullptr) return Status();
  bool share[2];
  for (int i = 0; i < 2; ++i) share[i] = past[i].data == present[i].data && Overlap(past[i], present[i]);
  if (share[0] != share[1]) {
    return Status::Error("past and present share the buffer of keys or of values alone, expected both or none");
  }
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 2; ++k) {
      if (!Overlap(past[i], present[k]) || (i == k && share[i])) continue;
      return Status::Error(std::string(names.past[i]) + " and " + names.present[k] + " overlap in memory, expected " +
                           (i == k ? "one buffer or two" : "a buffer each"));
    }
  }
  return Status();
}

Status BindScales(const Tensor* key_scale, const Tensor* value_scale, CacheAppendArgs* args) {
  STOF_RETURN_IF_ERROR(Bind("k_scale", key_scale, *args, &args->key_scale));
  return Bind("v_scale", value_scale, *args, &args->value_scale);
}

}  // namespace stof
