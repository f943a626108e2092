// SPDX-License-Identifier: Apache-2.0
// Compile-time shape of an sm_90a kernel: tile, pipelines, shared memory layout, registers; and the messages from
// producer to consumers.
#ifndef STOF_CUDA_ATTENTION_SM90_CONFIG_CUH_
#define STOF_CUDA_ATTENTION_SM90_CONFIG_CUH_

#include "cuda/attention/int8/layout.h"
#include "cuda/attention/sm90/api.h"
#include "cuda/common/math.h"
#include "cuda/common/mma_sm90.cuh"
#include "cuda/mask/fragments.h"

namespace stof {
namespace cuda {
namespace sm90 {

// The lowest finite bias that is finite in units of log2, too: lower ones are raised to it, as they must not become
// -inf, which is a mask.
constexpr float kLowestBias = -0x1.62e42ep127f;
constexpr int kAtom = 64;  // columns of a swizzled row of 128 bytes

constexpr int kMostKeys = 128;  // of a tile
constexpr int32_t kNoTile = -1;

// The mask of a KV tile: the index of its element mask, or
enum Code : int32_t {
  kFull = -1,    // every pair
  kPadded = -2,  // every pair of a key that exists and is not padding
  kEmpty = -3,   // stands for all tiles of a work tile that has none
};

// The message about a KV tile.
struct Entry {
  int32_t code;
  int32_t flags;                 // kLast, kHasPadding, kHasInfBias
  int32_t next;                  // code of the next tile, so that its element mask can be read early
  uint32_t pad[kMostKeys / 32];  // a bit for every key, only with kHasPadding
};

enum Flag : int32_t {
  kLast = 1,        // last KV tile of the work tile
  kHasPadding = 2,  // some bits of `pad` are 0
  kHasInfBias = 4,  // some relative biases are -inf
};

// The message about a work tile.
struct WorkTileInfo {
  int32_t b, h, row0;  // row0 -1: the end
  int32_t subtile;     // split (kSplitsRows) or half tile (kHalfTiles); negative: the whole tile row
};

// The last three parameters of Sm90Shape, by name: ping-pong scheduling also at the ends of a work tile, dynamic tiles,
// and tiles that are left out by their scores.
constexpr bool kPingPong = true, kDynamicTiles = true, kSkipByScore = true;

// Operands of the tensor cores. k16Bit: those of the query's type. kInt8: queries and keys in int8. kInt8Fp8: also
// weights and values in fp8 (e4m3). docs/design/attention-8bit.md.
enum class Operands { k16Bit, kInt8, kInt8Fp8 };

// A tile has kM query rows, 64 a consumer warpgroup, and kN keys. A CTA (thread block) has kPipelines pipelines: a
// producer warp and consumer warpgroups with stages and barriers of their own. One pipeline's prologue and epilogue
// overlap the others' work.
// Each pipeline counts as one CTA of the tile schedule and has its own work tiles. With kSplit > 1 all pipelines split
// the keys of one work tile instead: pipeline t computes KV tiles t, t + kSplit, ...
template <int kHead_, int kRows, int kTileKeys_, int kStages_, int kQueryStages_, int kPipelines_, int kSplit_ = 1,
          ScoreMod kScoreMod_ = ScoreMod::kNone, bool kPingPongEnds_ = false, bool kDynamic_ = false,
          bool kSkipsByScore_ = false, Operands kOperands_ = Operands::k16Bit>
struct Sm90Shape {
  // Ping-pong scheduling also orders the first scores and the last values of a work tile.
  static constexpr bool kPingPongEnds = kPingPongEnds_;
  static constexpr int kHead = kHead_, kM = kRows, kN = kTileKeys_, kStages = kStages_, kPipelines = kPipelines_;
  static constexpr int kSplit = kSplit_;
  static constexpr bool kScoreMod = kScoreMod_ != ScoreMod::kNone, kFullBias = kScoreMod_ == ScoreMod::kFullBias;
  static_assert(kSplit == 1 || kSplit == kPipelines, "all pipelines split a work tile, or none");
  static_assert(kSplit <= kFirstTiles, "a CtaStart has the first KV tile of each pipeline");
  static_assert(kN <= kMostKeys, "an entry has a bit for every key");
  static constexpr int kQueryStages =
      kQueryStages_;                          // buffers for queries: with 2 the next are loaded while one is read
  static constexpr int kConsumers = kM / 64;  // consumer warpgroups of a pipeline
  // A consumer warpgroup skips tiles in which others have all allowed pairs. Not with split pipelines: the KV tiles of
  // one might all be skipped.
  static constexpr bool kSkipsTiles = kConsumers > 1 && kSplit == 1 && !kScoreMod;
  static_assert(kConsumers <= kMostRowGroups, "a tile list names every warpgroup of a pipeline");
  // Whether a work tile may be a split of a tile row. With several warpgroups a split might have no pair of one of
  // them.
  static constexpr bool kSplitsRows = kConsumers == 1 && kSplit == 1 && !kScoreMod;
  // Whether a work tile may be a half tile: one warpgroup computes, the other skips all of its tiles.
  static constexpr bool kHalfTiles = kSkipsTiles && kConsumers == 2;
  // Whether a consumer warpgroup leaves out tiles by their scores.
  static constexpr bool kSkipsByScore = kSkipsByScore_;
  // 8-bit operands. kInnerSpan: bytes of a swizzled row of queries and keys.
  static constexpr bool kInt8 = kOperands_ != Operands::k16Bit, kFp8 = kOperands_ == Operands::kInt8Fp8;
  static constexpr int kInnerSize = kInt8 ? 1 : 2, kInnerSpan = kInnerSize * kHead < 128 ? kInnerSize * kHead : 128;
  static constexpr int kInnerAtom = kInnerSpan / kInnerSize;  // columns of such a row
  static_assert(!kInt8 || (kSplit == 1 && !kScoreMod && !kSkipsByScore_ && kConsumers > 1), "8-bit kernels");
  static_assert(!kFp8 || kN == 128, "the keys of a tile are one swizzled row of transposed values");
  // Outputs that a thread accumulates in fp8 products before they are added in fp32, and how many times that takes.
  static constexpr int kPartOutputs = 32, kParts = kHead / 2 / kPartOutputs;
  // The row max lies 2^kHeadroom below the largest score that it was set by, and is raised where a weight would exceed
  // kMostWeight = 2^kSlack. fp16 holds 2^14 with a factor of nearly four to spare, e4m3 at most 448.
  static constexpr float kHeadroom = kFp8 ? 7.0f : 0.0f, kSlack = kFp8 ? 8.75f : 14.0f;
  static constexpr float kMostWeight = kFp8 ? 430.0f : 16384.0f;
  // Whether a scheduler warp beside the producer supplies work tiles, which may be dynamic.
  static constexpr bool kDynamic = kDynamic_;
  static_assert(!kDynamic || (kSplit == 1 && kPipelines <= 2),
                "a scheduler warp for each pipeline, which has work tiles of its own");
  static constexpr int kThreads = kWarpgroup * (1 + kPipelines * kConsumers);
  static constexpr int kPaddingWords = kN / 32;  // padding bits of a KV tile
  static constexpr int kMaskWords = FragmentWords(kN);
  static constexpr int kQueryBytes = kInnerSize * kM * kHead, kOutputBytes = 2 * kM * kHead;
  static constexpr int kKeyBytes = kInnerSize * kN * kHead, kValueBytes = (kFp8 ? 1 : 2) * kN * kHead;
  static constexpr int kKeys = kQueryStages * kQueryBytes;  // offsets in a pipeline's shared memory
  static constexpr int kValues = kKeys + kStages * kKeyBytes;
  // Beside the keys of every stage: the full bias of its pairs, and the relative bias of every distance between its
  // queries and keys.
  static constexpr int kBiasBytes = kFullBias ? 4 * kM * kN : 0;
  static constexpr int kRelativeSize = kScoreMod ? kM + kN : 0;
  static constexpr int kFullBiases = kValues + kStages * kValueBytes;
  static constexpr int kOutput = kFullBiases + kStages * kBiasBytes;
  // One entry more than stages: a warp may still read an entry after it has released the keys.
  static constexpr int kSlots = kStages + 1;
  static constexpr int kScaleBytes = 4 * kTileScales;  // of a KV tile with 8-bit operands
  // Small data, with the padding that its alignment may cost.
  static constexpr int kSmallBytes = kStages * 4 * kRelativeSize + kSlots * static_cast<int>(sizeof(Entry)) +
                                     kQueryStages * static_cast<int>(sizeof(WorkTileInfo)) +
                                     8 * (4 * kStages + 2 * kQueryStages) + 8 + (kDynamic ? 40 : 0) +
                                     (kInt8 ? kStages * kScaleBytes : 0);
  static constexpr int PipelineBytes(int output) { return (kOutput + output + kSmallBytes + 1023) / 1024 * 1024; }
  static constexpr int kMostBytes = 227 * 1024, kToAlign = 1024;
  // The output is staged in a buffer of its own where there is room, else in place of the queries.
  static constexpr bool kSeparateOutput =
      kSplit == 1 && kPipelines * PipelineBytes(kOutputBytes) + kToAlign <= kMostBytes;
  static_assert(kSeparateOutput || !kInt8, "8-bit queries leave no room for an output");
  // Without that buffer the next queries wait until the output has left, but keys and values need not: they are loaded
  // first.
  static constexpr bool kQueriesAfterKeys = kQueryStages == 1 && kSplit == 1 && !kSeparateOutput;
  static constexpr int kRelativeBiases = kOutput + (kSeparateOutput ? kOutputBytes : 0);
  static constexpr int kScales = kRelativeBiases + kStages * 4 * kRelativeSize;
  static constexpr int kEntries = kScales + (kInt8 ? kStages * kScaleBytes : 0);
  static constexpr int kTileInfos = kEntries + kSlots * static_cast<int>(sizeof(Entry));
  static constexpr int kTileInfosEnd = kTileInfos + kQueryStages * static_cast<int>(sizeof(WorkTileInfo));
  static constexpr int kNextTile = (kTileInfosEnd + 15) / 16 * 16;  // with kDynamic: a WorkTile
  static constexpr int kBarriers =
      kDynamic ? kNextTile + static_cast<int>(sizeof(WorkTile)) : (kTileInfosEnd + 7) / 8 * 8;
  static constexpr int kPipelineBytes = PipelineBytes(kSeparateOutput ? kOutputBytes : 0);
  static_assert(kBarriers + 8 * (4 * kStages + 2 * kQueryStages + (kDynamic ? 1 : 0)) <= kPipelineBytes,
                "a pipeline's shared memory");
  // For split pipelines, behind their own memory: row max and row sum of every row and pipeline, and the chunks of
  // outputs that one pipeline computes and another adds up.
  static constexpr int kCombineMemory = kPipelines * kPipelineBytes;
  static constexpr int kCombineChunk = kHead / 2 / kSplit;  // outputs of a thread that its pipeline adds up
  static constexpr int kStatsBytes = kSplit == 1 ? 0 : 8 * kSplit * kM;
  static constexpr int kCombineBytes = 4 * kM / 64 * kWarpgroup * kCombineChunk * kSplit * (kSplit - 1);
  static constexpr int kSharedBytes = kCombineMemory + kStatsBytes + kCombineBytes + kToAlign;
  static_assert(kSharedBytes <= kMostBytes, "shared memory of a CTA");
  // Registers of a thread at launch, and of producers and consumers after setmaxnreg.
  static constexpr int kInitialRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kInitialRegisters >= 160 ? 40 : 32;
  static constexpr int kConsumerRegisters =
      (kInitialRegisters * (1 + kPipelines * kConsumers) - kProducerRegisters) / (kPipelines * kConsumers) / 8 * 8;
  // Eager weights are computed before it is known whether the row max stays, so their scores are kept, too. The first
  // kEagerSums of them are summed. Both numbers follow from the registers that outputs, scores and weights leave.
  static constexpr int kSpareRegisters = kConsumerRegisters - kHead / 2 - kN / 2 -
                                         (kFp8 ? kN / 8 + kPartOutputs : kN / 4) - (kFullBias ? 40 : 0) -
                                         (kSkipsByScore && (kScoreMod || kHead > 128) ? 16 : 0);
  static constexpr int kEagerSums = kSpareRegisters >= 64 && kN > 64 ? 16 : kSpareRegisters >= 48 ? 8 : 0;
  static constexpr int kEagerWeights = kEagerSums + (kEagerSums == 0 && kSplit > 1 ? 0 : 8);
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_CONFIG_CUH_
