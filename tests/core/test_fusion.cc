#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>

#include "control/fusion.h"

namespace polyhvd {
namespace {

using Ids = std::vector<CacheId>;

// Agreements by id, in the order in which they became ready.
class Ready {
 public:
  Agreement& add(std::int64_t elements, DType dtype = DType::kFloat32) {
    ids_.push_back(static_cast<CacheId>(ids_.size() + 1));
    Agreement& agreement = agreements_[ids_.back()];
    agreement.shapes = {{elements}};
    agreement.dtype = dtype;
    return agreement;
  }
  std::vector<Ids> fused(std::size_t bytes_max = 1024, bool groups_apart = false) const {
    std::vector<Ids> all;
    for (const Batch& batch : fuse(
             ids_, [this](CacheId id) -> const Agreement& { return agreements_.at(id); },
             FusionPolicy{bytes_max, groups_apart})) {
      all.push_back(batch.ids);
    }
    return all;
  }
  const Agreement& of(CacheId id) const { return agreements_.at(id); }

 private:
  Ids ids_;
  std::map<CacheId, Agreement> agreements_;
};

TEST_CASE("nothing ready makes no batch") { CHECK(Ready().fused().empty()); }

TEST_CASE("allreduces of one kind run as one, in order") {
  Ready ready;
  for (int i = 0; i < 4; ++i) ready.add(8);
  CHECK(ready.fused() == std::vector<Ids>{{1, 2, 3, 4}});
}

TEST_CASE("float16 between float32 does not break a batch") {
  Ready ready;
  ready.add(8);
  ready.add(8, DType::kFloat16);
  ready.add(8);
  ready.add(8, DType::kFloat16);
  CHECK(ready.fused() == std::vector<Ids>{{1, 3}, {2, 4}});
}

TEST_CASE("anything that the kernel depends on keeps allreduces apart") {
  Ready ready;
  ready.add(8);
  ready.add(8).process_set = 1;
  ready.add(8).op = ReduceOp::kMax;
  ready.add(8).scale.post = 0.5;
  ready.add(8).scale.pre = 0.5;
  ready.add(8).device = DeviceKind::kCuda;
  CHECK(ready.fused() == std::vector<Ids>{{1}, {2}, {3}, {4}, {5}, {6}});
}

TEST_CASE("other kinds are batches of one and do not break those around them") {
  for (const OpKind kind : {OpKind::kAlltoall, OpKind::kBroadcast, OpKind::kBarrier}) {
    Ready ready;
    ready.add(8);
    ready.add(8).kind = kind;
    ready.add(8).kind = kind;
    ready.add(8);
    CHECK(ready.fused() == std::vector<Ids>{{1, 4}, {2}, {3}});
  }
}

TEST_CASE("allgathers run as one whatever their dtypes, and apart from reductions") {
  Ready ready;
  ready.add(8).kind = OpKind::kAllgather;
  ready.add(8);
  ready.add(8, DType::kInt64).kind = OpKind::kAllgather;
  ready.add(8).kind = OpKind::kReducescatter;
  Agreement& group = ready.add(8);
  group.kind = OpKind::kAllgather;
  group.shapes = {{8}, {8, 2}};
  group.dtypes = {DType::kFloat32, DType::kInt64};
  ready.add(8).kind = OpKind::kReducescatter;
  CHECK(ready.fused() == std::vector<Ids>{{1, 3, 5}, {2}, {4, 6}});
  CHECK(ready.fused(1024, true) == std::vector<Ids>{{1, 3}, {2}, {4, 6}, {5}});
}

TEST_CASE("allgathers of other process sets and devices keep apart") {
  Ready ready;
  for (int i = 0; i < 3; ++i) ready.add(8).kind = OpKind::kAllgather;
  ready.add(8).kind = OpKind::kAllgather;
  Agreement& elsewhere = ready.add(8);
  elsewhere.kind = OpKind::kAllgather;
  elsewhere.process_set = 1;
  Agreement& on_gpu = ready.add(8);
  on_gpu.kind = OpKind::kAllgather;
  on_gpu.device = DeviceKind::kCuda;
  CHECK(ready.fused() == std::vector<Ids>{{1, 2, 3, 4}, {5}, {6}});
}

TEST_CASE("anything that the sum depends on keeps reducescatters apart") {
  Ready ready;
  for (int i = 0; i < 6; ++i) ready.add(8).kind = OpKind::kReducescatter;
  const auto last = [&](DType dtype = DType::kFloat32) -> Agreement& {
    Agreement& agreement = ready.add(8, dtype);
    agreement.kind = OpKind::kReducescatter;
    return agreement;
  };
  last(DType::kFloat16);
  last().op = ReduceOp::kMax;
  last().scale.post = 0.5;
  last().dtypes = {DType::kFloat32, DType::kInt32};
  CHECK(ready.fused() == std::vector<Ids>{{1, 2, 3, 4, 5, 6}, {7}, {8}, {9}, {10}});
}

TEST_CASE("a batch holds at most bytes_max, to the byte") {
  Ready ready;
  ready.add(128);
  ready.add(128);
  ready.add(1);
  CHECK(ready.fused(1024) == std::vector<Ids>{{1, 2}, {3}});
  CHECK(ready.fused(1028) == std::vector<Ids>{{1, 2, 3}});
  CHECK(ready.fused(1023) == std::vector<Ids>{{1}, {2, 3}});
}

TEST_CASE("one larger than bytes_max runs alone while smaller ones go on fusing") {
  Ready ready;
  ready.add(8);
  ready.add(1000);
  ready.add(8);
  CHECK(ready.fused(1024) == std::vector<Ids>{{1, 3}, {2}});
}

TEST_CASE("all tensors of a grouped request count") {
  Ready ready;
  ready.add(8).shapes = {{128}, {64, 2}};
  ready.add(1);
  CHECK(ready.fused(1024) == std::vector<Ids>{{1}, {2}});
}

TEST_CASE("groups apart are batches of their own, and do not break those around them") {
  Ready ready;
  ready.add(8);
  ready.add(8).shapes = {{8}, {8}};
  ready.add(8);
  ready.add(8).shapes = {{8}, {8}};
  CHECK(ready.fused(1024, true) == std::vector<Ids>{{1, 3}, {2}, {4}});
  CHECK(ready.fused(1024, false) == std::vector<Ids>{{1, 2, 3, 4}});
}

TEST_CASE("without a bound, or with bound zero, batches are all or one") {
  Ready ready;
  ready.add(8);
  ready.add(8);
  CHECK(ready.fused(std::numeric_limits<std::size_t>::max()) == std::vector<Ids>{{1, 2}});
  CHECK(ready.fused(0) == std::vector<Ids>{{1}, {2}});
}

TEST_CASE("higher priority goes first and equal priority keeps the order given") {
  Ready ready;
  ready.add(200).priority = -1;
  ready.add(200).priority = 5;
  ready.add(200).priority = 0;
  ready.add(200).priority = 5;
  CHECK(ready.fused(1024) == std::vector<Ids>{{2}, {4}, {3}, {1}});
  CHECK(ready.fused(4096) == std::vector<Ids>{{2, 4, 3, 1}});
}

TEST_CASE("sizes beyond any machine run alone") {
  Ready ready;
  ready.add(8);
  ready.add(8, DType::kFloat64).shapes.assign(40, {std::int64_t{1} << 59});
  ready.add(8);
  ready.add(8, DType::kFloat64).shapes.assign(4, {std::int64_t{1} << 59});
  CHECK(ready.fused() == std::vector<Ids>{{1, 3}, {2}, {4}});
}

TEST_CASE("random lists: each id once, none over the bound, one kind a batch") {
  constexpr OpKind kKinds[] = {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kReducescatter,
                               OpKind::kBroadcast};
  constexpr DType kTypes[] = {DType::kInt8, DType::kFloat32, DType::kFloat64};
  std::mt19937 random(11);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 300; ++round) {
    Ready ready;
    const int count = below(40);
    for (int i = 0; i < count; ++i) {
      Agreement& agreement = ready.add(1 + below(100), kTypes[below(3)]);
      agreement.priority = below(3);
      agreement.process_set = static_cast<ProcessSetId>(below(2));
      agreement.kind = kKinds[below(4)];
      if (below(4) > 0) continue;
      agreement.shapes.push_back({1 + below(50)});
      if (below(2) == 0) agreement.dtypes = {agreement.dtype, DType::kInt16};
    }
    std::vector<bool> seen(static_cast<std::size_t>(count) + 1);
    const bool apart = below(3) == 0;
    for (const Ids& ids : ready.fused(600, apart)) {
      REQUIRE_FALSE(ids.empty());
      const Agreement& first = ready.of(ids[0]);
      std::int64_t bytes = 0;
      for (const CacheId id : ids) {
        const Agreement& agreement = ready.of(id);
        CHECK_FALSE(seen[id]);
        seen[id] = true;
        for (std::size_t i = 0; i < agreement.shapes.size(); ++i) {
          bytes +=
              agreement.shapes[i][0] * static_cast<std::int64_t>(item_size(dtype_of(agreement, i)));
        }
        CHECK(agreement.kind == first.kind);
        CHECK(agreement.process_set == first.process_set);
        if (ids.size() == 1) continue;
        if (apart) CHECK(agreement.shapes.size() == 1);
        if (first.kind == OpKind::kAllgather) continue;
        CHECK(agreement.dtype == first.dtype);
        CHECK(agreement.dtypes.empty());
      }
      if (ids.size() > 1) {
        CHECK(bytes <= 600);
        CHECK(first.kind != OpKind::kBroadcast);
      }
    }
    CHECK(std::count(seen.begin(), seen.end(), true) == count);
  }
}

}  // namespace
}  // namespace polyhvd
