// SPDX-License-Identifier: Apache-2.0
// The one symbol that ONNX Runtime looks for. Nothing is linked from it: everything comes through the OrtApiBase.
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/c_api/c_api.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/ort/adapter.h"

namespace {

// The operators for one API table. ONNX Runtime keeps pointers to the registrations and the domain for as long as any
// session lives, and several sessions may register the library: made once per API table and never freed.
struct Domain {
  const OrtApi* api = nullptr;
  OrtCustomOpDomain* domain = nullptr;
  std::vector<std::unique_ptr<stof::ort::Registration>> registrations;
};

// The pairs of T and storage type that an operator is registered for. A node without a stored input takes the first one
// of its T: that without another storage type.
std::vector<std::pair<stof::DType, stof::DType>> TypesOf(const stof::OpDescription& op, bool cuda) {
  std::vector<std::pair<stof::DType, stof::DType>> pairs;
  for (const stof::DType type : cuda ? op.cuda_types : op.types) {
    pairs.emplace_back(type, type);
    for (const stof::DType storage : op.storage_types) pairs.emplace_back(type, storage);
  }
  return pairs;
}

OrtStatus* MakeDomain(const OrtApi* api, Domain* made) {
  made->api = api;
  if (OrtStatus* status = api->CreateCustomOpDomain("stof", &made->domain)) return status;
  int count = 0;
  const bool has_cuda = stof::FindCudaBackend() != nullptr;
  const stof::OpDescription* const* ops = stof::AllOps(&count);
  for (int i = 0; i < count; ++i) {
    // A runtime without a provider of that name ignores the registrations for it.
    for (const char* provider :
         {static_cast<const char*>(nullptr), "CUDAExecutionProvider", "CudaPluginExecutionProvider"}) {
      const bool cuda = provider != nullptr;
      if (cuda && !has_cuda) continue;
      for (const auto& [type, storage] : TypesOf(*ops[i], cuda)) {
        made->registrations.push_back(std::make_unique<stof::ort::Registration>());
        stof::ort::Fill(api, *ops[i], type, storage, provider, made->registrations.back().get());
        OrtStatus* status = api->CustomOpDomain_Add(made->domain, made->registrations.back().get());
        if (status != nullptr) {
          api->ReleaseCustomOpDomain(made->domain);
          return status;
        }
      }
    }
  }
  return nullptr;
}

OrtStatus* DomainOf(const OrtApi* api, OrtCustomOpDomain** domain) {
  static stof::ProcessWide<stof::ForkSafe<std::vector<std::unique_ptr<Domain>>>> domains;
  const auto all = domains.Get().Lock();
  for (const auto& entry : *all) {
    if (entry->api == api) {
      *domain = entry->domain;
      return nullptr;
    }
  }
  auto made = std::make_unique<Domain>();
  if (OrtStatus* status = MakeDomain(api, made.get())) return status;
  *domain = made->domain;
  all->push_back(std::move(made));
  return nullptr;
}

}  // namespace

extern "C" STOF_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(stof::ort::kApiVersion);
  if (api == nullptr) {
    // Older runtimes know older tables: CreateStatus is in every one, and silence would surface much later as
    // "StofAttention is not a registered function/op".
    const OrtApi* old = base->GetApi(1);
    if (old == nullptr) return nullptr;
    const std::string message = std::string("stof needs ONNX Runtime 1.18 or later, found ") +
                                base->GetVersionString() +
                                ": upgrade onnxruntime, or run the model without the library";
    return old->CreateStatus(ORT_NOT_IMPLEMENTED, message.c_str());
  }
  try {
    OrtCustomOpDomain* domain = nullptr;
    if (OrtStatus* status = DomainOf(api, &domain)) return status;
    return api->AddCustomOpDomain(options, domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}
