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
constexpr int32_t kNoItem = -1;

// What is allowed of a tile: the index of its bits in the mask, or
enum Code : int32_t {
  kEvery = -1,    // every pair
  kPadded = -2,   // every pair of a key that is there and no padding
  kNothing = -3,  // instead of the tiles of an item that has none
};

// What the producer says about a key tile.
struct Entry {
  int32_t code;
  int32_t flags;                 // kLast, kPads
  int32_t next;                  // code of the tile behind it, so that its bits can be asked for early
  uint32_t pad[kMostKeys / 32];  // a bit for every key, with kPads alone
};

enum Flag : int32_t {
  kLast = 1,  // of its item
  kPads = 2,  // some bits of `pad` are 0
  kBars = 4,  // some distances have a bias of -inf
};

// What it says about an item.
struct Item {
  int32_t b, h, row0;  // row0 -1: no more work
  int32_t part;        // with kCuts the part, with kHalves the warpgroup; negative: all of the row
};

// A kernel's shape: a tile is kM query rows, 64 a consumer, by kN keys. A CTA has kTeams of a producer warp and
// consumers each, which share nothing but the multiprocessor: one's start and end are covered by the other. With kSplit
// teams to an item they share it, too: team t takes its tiles t, t + kSplit and so on.
template <int kHead_, int kRows, int kTileKeys_, int kStages_, int kQueries_, int kTeams_, int kSplit_ = 1,
          Extras kExtras_ = Extras::kNone, bool kTurnAtEnds_ = false, bool kDraws_ = false>
struct Shape {
  // The turn also passes for an item's first scores and last product.
  static constexpr bool kTurnAtEnds = kTurnAtEnds_;
  static constexpr int kHead = kHead_, kM = kRows, kN = kTileKeys_, kStages = kStages_, kTeams = kTeams_;
  static constexpr int kSplit = kSplit_;
  static constexpr bool kExtras = kExtras_ != Extras::kNone, kPairs = kExtras_ == Extras::kPairs;
  static_assert(kSplit == 1 || kSplit == kTeams, "all teams share an item, or none");
  static_assert(kSplit <= kFirstTiles, "a start knows each team's first tile");
  static_assert(kN <= kMostKeys, "an entry has a bit for every key");
  static constexpr int kQueries = kQueries_;  // query tiles in shared memory: with 2 the next comes while one is read
  static constexpr int kConsumers = kM / 64;  // of a team
  // A warpgroup leaves tiles to others that have all their pairs; a team's share of an item may be others' alone.
  static constexpr bool kPasses = kConsumers > 1 && kSplit == 1 && !kExtras;
  static_assert(kConsumers <= kMostGroups, "a walk names every warpgroup of a team");
  // Whether an item may be a part of a row of tiles; with more warpgroups it might be nothing to one of them.
  static constexpr bool kCuts = kConsumers == 1 && kSplit == 1 && !kExtras;
  // Whether an item may be one warpgroup's rows alone, which end sooner: the other one passes over all of its tiles.
  static constexpr bool kHalves = kPasses && kConsumers == 2;
  // Whether a warp beside the producer says what comes next, which may be drawn at run time.
  static constexpr bool kDraws = kDraws_;
  static_assert(!kDraws || (kSplit == 1 && kTeams <= 2), "a warp for each team, whose items are its own");
  static constexpr int kThreads = kWarpgroup * (1 + kTeams * kConsumers);
  static constexpr int kWords = kN / 32;  // of padding, a tile
  static constexpr int kOwnWords = FragmentWords(kN);
  static constexpr int kQueryBytes = 2 * kM * kHead;
  static constexpr int kTileBytes = 2 * kN * kHead;
  static constexpr int kKeys = kQueries * kQueryBytes;  // offsets in a team's shared memory
  static constexpr int kValues = kKeys + kStages * kTileBytes;
  // With every stage's keys: the bias of its pairs, and that of every distance between its queries and keys.
  static constexpr int kBiasBytes = kPairs ? 4 * kM * kN : 0;
  static constexpr int kWindow = kExtras ? kM + kN : 0;
  static constexpr int kBiases = kValues + kStages * kTileBytes;
  static constexpr int kOutput = kBiases + kStages * kBiasBytes;
  // One entry more than stages: what a warp still reads of an entry after it gave its keys back stays until it is done.
  static constexpr int kSlots = kStages + 1;
  // What is small, with what its alignment may cost.
  static constexpr int kSmall = kStages * 4 * kWindow + kSlots * static_cast<int>(sizeof(Entry)) +
                                kQueries * static_cast<int>(sizeof(Item)) + 8 * (4 * kStages + 2 * kQueries) + 8 +
                                (kDraws ? 40 : 0);
  static constexpr int TeamBytes(int output) { return (kOutput + output + kSmall + 1023) / 1024 * 1024; }
  static constexpr int kMostBytes = 227 * 1024, kToAlign = 1024;
  // The output on its way to memory: in a place of its own where there is room, else where the item's queries were.
  static constexpr bool kOwnOutput = kSplit == 1 && kTeams * TeamBytes(kQueryBytes) + kToAlign <= kMostBytes;
  // Queries then wait until the output before them has left, which keys and values need not.
  static constexpr bool kQueriesLast = kQueries == 1 && kSplit == 1 && !kOwnOutput;
  static constexpr int kWindows = kOutput + (kOwnOutput ? kQueryBytes : 0);
  static constexpr int kEntries = kWindows + kStages * 4 * kWindow;
  static constexpr int kItems = kEntries + kSlots * static_cast<int>(sizeof(Entry));
  static constexpr int kBehindItems = kItems + kQueries * static_cast<int>(sizeof(Item));
  static constexpr int kNext = (kBehindItems + 15) / 16 * 16;  // with kDraws: a WorkItem
  static constexpr int kBarriers = kDraws ? kNext + static_cast<int>(sizeof(WorkItem)) : (kBehindItems + 7) / 8 * 8;
  static constexpr int kTeamBytes = TeamBytes(kOwnOutput ? kQueryBytes : 0);
  static_assert(kBarriers + 8 * (4 * kStages + 2 * kQueries + (kDraws ? 1 : 0)) <= kTeamBytes, "a team's memory");
  // Behind the teams, where they share items: a maximum and a sum for every row of every team, and of every output the
  // parts that one team makes and another adds up.
  static constexpr int kParts = kTeams * kTeamBytes;
  static constexpr int kChunk = kHead / 2 / kSplit;  // outputs of a thread that its team adds up
  static constexpr int kStatBytes = kSplit == 1 ? 0 : 8 * kSplit * kM;
  static constexpr int kPartBytes = 4 * kM / 64 * kWarpgroup * kChunk * kSplit * (kSplit - 1);
  static constexpr int kSharedBytes = kParts + kStatBytes + kPartBytes + kToAlign;
  static_assert(kSharedBytes <= kMostBytes, "shared memory of a CTA");
  // Registers of a thread at the start, and what producers and consumers have after an exchange.
  static constexpr int kAtStart = 65536 / kThreads / 8 * 8;
  static constexpr int kProducer = kAtStart >= 160 ? 40 : 32;
  static constexpr int kConsumer = (kAtStart * (1 + kTeams * kConsumers) - kProducer) / (kTeams * kConsumers) / 8 * 8;
  // Weights of a thread that are made while it is not known whether the reference stays: their scores stay, too. The
  // first ones are summed, as many as there are registers for beside outputs, scores and weights.
  static constexpr int kSpare = kConsumer - kHead / 2 - kN / 2 - kN / 4 - (kPairs ? 40 : 0);
  static constexpr int kSummed = kSpare >= 64 && kN > 64 ? 16 : kSpare >= 48 ? 8 : 0;
  static constexpr int kBegun = kSummed + (kSummed == 0 && kSplit > 1 ? 0 : 8);
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_CONFIG_CUH_
