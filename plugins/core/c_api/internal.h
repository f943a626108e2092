// SPDX-License-Identifier: Apache-2.0
// Helpers of the C ABI's files.
#ifndef STOF_PLUGINS_CORE_C_API_INTERNAL_H_
#define STOF_PLUGINS_CORE_C_API_INTERNAL_H_

#include <cstdio>
#include <exception>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/core/c_api/c_api.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/host/quoted.h"

struct stof_op {
  std::unique_ptr<stof::Op> op;
};

namespace stof {

// The message as one line of UTF-8, cut where the caller's buffer ends.
inline int Finish(const Status& status, char* error, size_t error_size) {
  if (status.ok()) return 0;
  if (error == nullptr || error_size == 0) return 1;
  size_t at = 0;
  bool full = false;
  Escape(status.message(), [&](std::string_view piece) {
    full = full || piece.size() >= error_size - at;
    if (!full) at += piece.copy(error + at, piece.size());
  });
  error[at] = '\0';
  return 1;
}

// Runs fn and turns its exceptions (out of memory, above all) into an error.
template <typename Fn>
int RunGuarded(char* error, size_t error_size, Fn fn) {
  try {
    return Finish(fn(), error, error_size);
  } catch (const std::exception& e) {
    return Finish(Status::Error(e.what()), error, error_size);
  }
}

inline Status Convert(const stof_tensor& from, Tensor* to) {
  if (from.rank < 0 || from.rank > kMaxRank) {
    return Status::Error("a tensor of rank " + std::to_string(from.rank) + ", expected 0 to 8");
  }
  to->data = from.data;
  to->dtype = static_cast<DType>(from.dtype);
  to->rank = from.rank;
  for (int i = 0; i < from.rank; ++i) {
    if (from.dims[i] < 0) return Status::Error("a negative dimension");
    to->dims[i] = from.dims[i];
  }
  return Status();
}

// An argument that a function cannot do without.
struct Required {
  const char* name;
  const void* pointer;
};
inline Status CheckGiven(std::initializer_list<Required> arguments) {
  for (const Required& argument : arguments) {
    if (argument.pointer == nullptr) {
      return Status::Error(std::string("argument ") + argument.name + " is a null pointer");
    }
  }
  return Status();
}
// A list that is empty may be a null pointer.
inline Status CheckList(const char* name, const void* list, int count) {
  if (count < 0) return Status::Error(std::string("a negative number of ") + name);
  return count == 0 ? Status() : CheckGiven({{name, list}});
}

inline Status Convert(const stof_tensor* from, int count, std::vector<Tensor>* to) {
  STOF_RETURN_IF_ERROR(CheckList("tensors", from, count));
  to->resize(static_cast<size_t>(count));
  for (size_t i = 0; i < to->size(); ++i) STOF_RETURN_IF_ERROR(Convert(from[i], &(*to)[i]));
  return Status();
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_C_API_INTERNAL_H_
