// SPDX-License-Identifier: Apache-2.0
// The shape of a 9.0 kernel: its tile, its teams, what lies where in shared memory, and what producers say to
// consumers.
#ifndef STOF_CUDA_ATTENTION_SM90_CONFIG_CUH_
#define STOF_CUDA_ATTENTION_SM90_CONFIG_CUH_

#include "cuda/attention/sm90/api.h"
#include "cuda/common/math.h"
#include "cuda/common/mma_sm90.cuh"
#include "cuda/mask/fragments.h"

namespace stof {
namespace cuda {
namespace sm90 {

// What the lowest biases become in units of log2: not -inf, for they are no mask.
constexpr float kLowestBias = -0x1.62e42ep127f;  // that is finite in units of log2
constexpr int kAtom = 64;                        // columns of a swizzled row of 128 bytes

constexpr int kMostKeys = 128;  // of a tile
constexpr int32_t kNoTile = -1;

// What is allowed of a tile: the index of its bits in the mask, or
enum Code : int32_t {
  kFull = -1,    // every pair
  kPadded = -2,  // every pair of a key that is there and no padding
  kEmpty = -3,   // instead of the tiles of an info that has none
};

// What the producer says about a key tile.
struct Entry {
  int32_t code;
  int32_t flags;                 // kLast, kPads
  int32_t next;                  // code of the tile behind it, so that its bits can be asked for early
  uint32_t pad[kMostKeys / 32];  // a bit for every key, with kPads alone
};

enum Flag : int32_t {
  kLast = 1,        // of its info
  kHasPadding = 2,  // some bits of `pad` are 0
  kHasInfBias = 4,  // some distances have a bias of -inf
};

// What it says about an info.
struct WorkTileInfo {
  int32_t b, h, row0;  // row0 -1: no more work_tile
  int32_t subtile;     // with kCuts the part, with kHalves the warpgroup; negative: all of the row
};

// A kernel's shape: a tile is kM query rows, 64 a consumer, by kN keys. A CTA has kTeams of a producer warp and
// consumers each, which share nothing but the multiprocessor: one's start and end are covered by the other. With kSplit
// teams to an info they share it, too: team t takes its tiles t, t + kSplit and so on.
template <int kHead_, int kRows, int kTileKeys_, int kStages_, int kQueryStages_, int kPipelines_, int kSplit_ = 1,
          ScoreMod kScoreMod_ = ScoreMod::kNone, bool kPingPongEnds_ = false, bool kDynamic_ = false>
struct Shape {
  // The turn also passes for an info's first scores and last product.
  static constexpr bool kPingPongEnds = kPingPongEnds_;
  static constexpr int kHead = kHead_, kM = kRows, kN = kTileKeys_, kStages = kStages_, kPipelines = kPipelines_;
  static constexpr int kSplit = kSplit_;
  static constexpr bool kScoreMod = kScoreMod_ != ScoreMod::kNone, kFullBias = kScoreMod_ == ScoreMod::kFullBias;
  static_assert(kSplit == 1 || kSplit == kPipelines, "all teams share an info, or none");
  static_assert(kSplit <= kFirstTiles, "a start knows each team's first tile");
  static_assert(kN <= kMostKeys, "an entry has a bit for every key");
  static constexpr int kQueryStages =
      kQueryStages_;                          // query tiles in shared memory: with 2 the next comes while one is read
  static constexpr int kConsumers = kM / 64;  // of a team
  // A warpgroup leaves tiles to others that have all their pairs; a team's share of an info may be others' alone.
  static constexpr bool kSkipsTiles = kConsumers > 1 && kSplit == 1 && !kScoreMod;
  static_assert(kConsumers <= kMostRowGroups, "a walk names every warpgroup of a team");
  // Whether an info may be a part of a row of tiles; with more warpgroups it might be nothing to one of them.
  static constexpr bool kSplitsRows = kConsumers == 1 && kSplit == 1 && !kScoreMod;
  // Whether an info may be one warpgroup's rows alone, which end sooner: the other one passes over all of its tiles.
  static constexpr bool kHalfTiles = kSkipsTiles && kConsumers == 2;
  // Whether a warp beside the producer says what comes next, which may be drawn at run time.
  static constexpr bool kDynamic = kDynamic_;
  static_assert(!kDynamic || (kSplit == 1 && kPipelines <= 2), "a warp for each team, whose items are its own");
  static constexpr int kThreads = kWarpgroup * (1 + kPipelines * kConsumers);
  static constexpr int kPaddingWords = kN / 32;  // of padding, a tile
  static constexpr int kMaskWords = FragmentWords(kN);
  static constexpr int kQueryBytes = 2 * kM * kHead;
  static constexpr int kTileBytes = 2 * kN * kHead;
  static constexpr int kKeys = kQueryStages * kQueryBytes;  // offsets in a team's shared memory
  static constexpr int kValues = kKeys + kStages * kTileBytes;
  // With every stage's keys: the bias of its pairs, and that of every distance between its queries and keys.
  static constexpr int kBiasBytes = kFullBias ? 4 * kM * kN : 0;
  static constexpr int kRelativeSize = kScoreMod ? kM + kN : 0;
  static constexpr int kFullBiases = kValues + kStages * kTileBytes;
  static constexpr int kOutput = kFullBiases + kStages * kBiasBytes;
  // One entry more than stages: what a warp still reads of an entry after it gave its keys back stays until it is done.
  static constexpr int kSlots = kStages + 1;
  // What is small, with what its alignment may cost.
  static constexpr int kSmallBytes = kStages * 4 * kRelativeSize + kSlots * static_cast<int>(sizeof(Entry)) +
                                     kQueryStages * static_cast<int>(sizeof(WorkTileInfo)) +
                                     8 * (4 * kStages + 2 * kQueryStages) + 8 + (kDynamic ? 40 : 0);
  static constexpr int PipelineBytes(int output) { return (kOutput + output + kSmallBytes + 1023) / 1024 * 1024; }
  static constexpr int kMostBytes = 227 * 1024, kToAlign = 1024;
  // The output on its way to memory: in a place of its own where there is room, else where the info's queries were.
  static constexpr bool kSeparateOutput =
      kSplit == 1 && kPipelines * PipelineBytes(kQueryBytes) + kToAlign <= kMostBytes;
  // Queries then wait until the output before them has left, which keys and values need not.
  static constexpr bool kQueriesAfterKeys = kQueryStages == 1 && kSplit == 1 && !kSeparateOutput;
  static constexpr int kRelativeBiases = kOutput + (kSeparateOutput ? kQueryBytes : 0);
  static constexpr int kEntries = kRelativeBiases + kStages * 4 * kRelativeSize;
  static constexpr int kTileInfos = kEntries + kSlots * static_cast<int>(sizeof(Entry));
  static constexpr int kTileInfosEnd = kTileInfos + kQueryStages * static_cast<int>(sizeof(WorkTileInfo));
  static constexpr int kNextTile = (kTileInfosEnd + 15) / 16 * 16;  // with kDraws: a WorkTile
  static constexpr int kBarriers =
      kDynamic ? kNextTile + static_cast<int>(sizeof(WorkTile)) : (kTileInfosEnd + 7) / 8 * 8;
  static constexpr int kPipelineBytes = PipelineBytes(kSeparateOutput ? kQueryBytes : 0);
  static_assert(kBarriers + 8 * (4 * kStages + 2 * kQueryStages + (kDynamic ? 1 : 0)) <= kPipelineBytes,
                "a team's memory");
  // Behind the teams, where they share items: a maximum and a sum for every row of every team, and of every output the
  // parts that one team makes and another adds up.
  static constexpr int kCombineMemory = kPipelines * kPipelineBytes;
  static constexpr int kCombineChunk = kHead / 2 / kSplit;  // outputs of a thread that its team adds up
  static constexpr int kStatsBytes = kSplit == 1 ? 0 : 8 * kSplit * kM;
  static constexpr int kCombineBytes = 4 * kM / 64 * kWarpgroup * kCombineChunk * kSplit * (kSplit - 1);
  static constexpr int kSharedBytes = kCombineMemory + kStatsBytes + kCombineBytes + kToAlign;
  static_assert(kSharedBytes <= kMostBytes, "shared memory of a CTA");
  // Registers of a thread at the start, and what producers and consumers have after an exchange.
  static constexpr int kInitialRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kInitialRegisters >= 160 ? 40 : 32;
  static constexpr int kConsumerRegisters =
      (kInitialRegisters * (1 + kPipelines * kConsumers) - kProducerRegisters) / (kPipelines * kConsumers) / 8 * 8;
  // Weights of a thread that are made while it is not known whether the reference stays: their scores stay, too. The
  // first ones are summed, as many as there are registers for beside outputs, scores and weights.
  static constexpr int kSpareRegisters = kConsumerRegisters - kHead / 2 - kN / 2 - kN / 4 - (kFullBias ? 40 : 0);
  static constexpr int kEagerSums = kSpareRegisters >= 64 && kN > 64 ? 16 : kSpareRegisters >= 48 ? 8 : 0;
  static constexpr int kEagerWeights = kEagerSums + (kEagerSums == 0 && kSplit > 1 ? 0 : 8);
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_CONFIG_CUH_
