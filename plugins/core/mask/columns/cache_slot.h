// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_MASK_COLUMNS_CACHE_SLOT_H_
#define STOF_PLUGINS_CORE_MASK_COLUMNS_CACHE_SLOT_H_

#include <memory>

#include "plugins/core/host/fork_guard.h"

namespace stof {

// A slot for one thing that a backend has made of a mask, for its next run; several threads may ask.
class MaskCacheSlot {
 public:
  std::shared_ptr<const void> Get() const { return *what_.Lock(); }
  void Set(std::shared_ptr<const void> what) const { what_.Lock()->swap(what); }

 private:
  mutable ForkSafe<std::shared_ptr<const void>> what_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_COLUMNS_CACHE_SLOT_H_
