#include "engine/op_queue.h"

#include <algorithm>
#include <limits>

#include "control/disagreement.h"
#include "control/error.h"
#include "control/unhurried.h"
#include "control/wire.h"

namespace polyhvd {
namespace {

constexpr std::size_t kNameBytesMax = 4096;

std::string describe(const Submission& s) {
  return std::string(name_of(s.kind)) + " '" + s.name + "'";
}

[[noreturn]] void invalid(const Submission& s, const std::string& what) {
  throw Failure(ErrorCode::kInvalidArgument, describe(s) + ": " + what);
}

// Names go to all ranks, and into every message about the operation.
[[noreturn]] void refuse_name(const Submission& s) {
  constexpr std::size_t kShown = 60;
  std::size_t shown = kShown;
  while (shown > 0 && (s.name[shown] & 0xc0) == 0x80) --shown;  // no half of a character
  throw Failure(ErrorCode::kInvalidArgument,
                std::string(name_of(s.kind)) + " '" + s.name.substr(0, shown) +
                    "...': the name has " + std::to_string(s.name.size()) + " bytes; at most " +
                    std::to_string(kNameBytesMax) + " are allowed: use a shorter one");
}

std::size_t bytes_of(const TensorView& tensor) {
  return static_cast<std::size_t>(element_count(tensor.shape)) * item_size(tensor.dtype);
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

void OpQueue::check_membership(const Submission& s) const {
  if (joined_) {
    invalid(s, "rank " + std::to_string(rank_) +
                   " has called join(), and cannot take part in operations until all ranks have; "
                   "wait for join()");
  }
  if (!sets_.contains(s.process_set)) {
    if (s.process_set < sets_.added()) {
      invalid(s, "process set " + std::to_string(s.process_set) + " was removed");
    }
    invalid(s, "process set " + std::to_string(s.process_set) +
                   " does not exist; pass it to init(process_sets=[...]) or add_process_set() on "
                   "every rank");
  }
  if (!sets_.position(s.process_set, rank_)) {
    invalid(s, "rank " + std::to_string(rank_) + " is not in process set " +
                   std::to_string(s.process_set) + ", which has " +
                   text_of_ranks(sets_.members(s.process_set)) + "; call it on its members only");
  }
}

void OpQueue::check(const Submission& s) const {
  if (s.name.empty()) invalid(s, "the name is empty");
  if (s.name.size() > kNameBytesMax) refuse_name(s);
  check_membership(s);
  if (s.kind == OpKind::kAddProcessSet) check_new_set(s);
  if (s.kind == OpKind::kRemoveProcessSet) check_removal(s);
  if (!has_tensors(s.kind)) return;
  if (s.inputs.empty()) invalid(s, "there is no tensor");
  if (!s.outputs.empty() && s.outputs.size() != s.inputs.size()) {
    invalid(s, "there are " + std::to_string(s.inputs.size()) + " inputs and " +
                   std::to_string(s.outputs.size()) + " outputs");
  }
  for (std::size_t i = 0; i < s.inputs.size(); ++i) {
    const TensorView& in = s.inputs[i];
    if (in.shape.size() > static_cast<std::size_t>(kTensorRankMax)) {
      invalid(s, "a tensor has " + std::to_string(in.shape.size()) + " dimensions; at most " +
                     std::to_string(kTensorRankMax) + " are supported");
    }
    if (in.shape.empty() && (has_own_rows(s.kind) || s.kind == OpKind::kReducescatter)) {
      invalid(s, "a scalar has no first dimension; reshape it to [1]");
    }
    if (s.outputs.empty() || (s.kind != OpKind::kAllreduce && s.kind != OpKind::kBroadcast)) {
      continue;
    }
    if (s.outputs[i].dtype != in.dtype || s.outputs[i].shape != in.shape) {
      invalid(s, "the output is " + std::string(name_of(s.outputs[i].dtype)) + " " +
                     to_string(s.outputs[i].shape) + ", the input " +
                     std::string(name_of(in.dtype)) + " " + to_string(in.shape));
    }
  }
  if (s.kind == OpKind::kAlltoall) check_splits(s);
  if (s.kind == OpKind::kBroadcast && !sets_.position(s.process_set, s.root)) {
    invalid(s, "root rank " + std::to_string(s.root) + " is not in process set " +
                   std::to_string(s.process_set) + ", which has " +
                   text_of_ranks(sets_.members(s.process_set)));
  }
}

void OpQueue::require_valid(const Submission& s) const {
  std::lock_guard lock(mutex_);
  check(s);
}

void OpQueue::check_splits(const Submission& s) const {
  if (s.inputs.size() != 1) invalid(s, "it takes one tensor");
  const auto members = static_cast<std::int64_t>(sets_.members(s.process_set).size());
  const std::int64_t rows = s.inputs[0].shape[0];
  if (s.numbers.empty()) {
    if (rows % members == 0 && rows / members <= std::numeric_limits<std::int32_t>::max()) return;
    invalid(s, "a first dimension of " + std::to_string(rows) +
                   " cannot be divided equally among " + std::to_string(members) +
                   " ranks; pass splits");
  }
  if (static_cast<std::int64_t>(s.numbers.size()) != members) {
    invalid(s, "splits has " + std::to_string(s.numbers.size()) + " entries for " +
                   std::to_string(members) + " ranks; pass one for each rank");
  }
  std::int64_t sum = 0;
  for (const std::int64_t part : s.numbers) {
    if (part < 0 || part > std::numeric_limits<std::int32_t>::max()) {
      invalid(s, "splits holds " + std::to_string(part) + "; entries are from 0 to 2^31 - 1");
    }
    sum += part;
  }
  if (sum > rows) {
    invalid(s, "splits " + to_string(s.numbers) + " sum to " + std::to_string(sum) +
                   ", more than the first dimension of " + std::to_string(rows));
  }
}

// The coordinator looks at the set itself, so that all ranks receive the same error.
void OpQueue::check_new_set(const Submission& s) const {
  for (const std::int64_t rank : s.numbers) {
    if (rank >= 0 && rank <= std::numeric_limits<int>::max()) continue;
    invalid(s, "rank " + std::to_string(rank) + " is not in the world of " +
                   std::to_string(sets_.world_size()) + " ranks");
  }
}

void OpQueue::check_removal(const Submission& s) const {
  const auto id = static_cast<ProcessSetId>(s.root);
  if (id == kWorld) invalid(s, "the global process set cannot be removed");
}

// An in-place tensor is one write; its input is not a second access.
void OpQueue::claim_memory(const Operation& operation) {
  const Submission& s = operation.submission;
  std::size_t claimed = 0;
  const auto claim = [&](const TensorView& t, bool write) {
    if (!memory_.add(t.data, bytes_of(t), write)) return false;
    ++claimed;
    return true;
  };
  bool ok = true;
  for (std::size_t i = 0; ok && i < s.outputs.size(); ++i) ok = claim(s.outputs[i], true);
  for (std::size_t i = 0; ok && i < s.inputs.size(); ++i) {
    const bool in_place = !s.outputs.empty() && s.outputs[i].data == s.inputs[i].data;
    if (in_place) {
      ++claimed;
      continue;
    }
    ok = claim(s.inputs[i], false);
  }
  if (ok) return;
  for (std::size_t i = 0; i < claimed; ++i) {
    if (i < s.outputs.size()) {
      memory_.remove(s.outputs[i].data, bytes_of(s.outputs[i]), true);
    } else {
      const std::size_t k = i - s.outputs.size();
      const bool in_place = !s.outputs.empty() && s.outputs[k].data == s.inputs[k].data;
      if (!in_place) memory_.remove(s.inputs[k].data, bytes_of(s.inputs[k]), false);
    }
  }
  invalid(s, "a tensor overlaps memory of an operation in flight; synchronize() that one first");
}

void OpQueue::release_memory(const Operation& operation) {
  const Submission& s = operation.submission;
  for (const TensorView& t : s.outputs) memory_.remove(t.data, bytes_of(t), true);
  for (std::size_t i = 0; i < s.inputs.size(); ++i) {
    const bool in_place = !s.outputs.empty() && s.outputs[i].data == s.inputs[i].data;
    if (!in_place) memory_.remove(s.inputs[i].data, bytes_of(s.inputs[i]), false);
  }
}

Request OpQueue::request_of(const Operation& operation) const {
  const Submission& s = operation.submission;
  Request request;
  request.rank = rank_;
  request.process_set = s.process_set;
  request.kind = s.kind;
  request.op = s.op;
  request.root = s.root;
  request.priority = s.priority;
  request.scale = s.scale;
  request.name = s.name;
  request.where = s.where;
  request.turn = s.turn;
  request.shapes.reserve(s.inputs.size());
  for (const TensorView& t : s.inputs) request.shapes.push_back(t.shape);
  if (!s.inputs.empty()) {
    request.dtype = s.inputs[0].dtype;
    request.device = s.inputs[0].device.kind;
  }
  const auto differs = [&](const TensorView& t) { return t.dtype != request.dtype; };
  if (std::ranges::any_of(s.inputs, differs)) {
    for (const TensorView& t : s.inputs) request.dtypes.push_back(t.dtype);
  }
  if (s.kind == OpKind::kAddProcessSet) {
    for (const std::int64_t rank : s.numbers) request.shapes.push_back({rank});
  }
  return request;
}

// The turn and the name that show in which order calls without a name were submitted.
void OpQueue::number(Submission& s) {
  s.turn = ++turns_[{s.process_set, s.kind}];
  s.name.assign(TurnName(s.kind, s.turn).view());
}

Turn OpQueue::take_turn(ProcessSetId set, OpKind kind) {
  Submission s;
  s.kind = kind;
  s.process_set = set;
  leave_unnamed(s);
  std::lock_guard lock(mutex_);
  check_membership(s);
  return ++turns_[{set, kind}];
}

void OpQueue::pass_over(const TurnKey& key) {
  std::lock_guard lock(mutex_);
  if (!sets_.contains(key.process_set)) return;  // removed before this refusal came
  Turn& last = turns_[{key.process_set, key.kind}];
  last = std::max(last, key.turn);
}

OperationPtr OpQueue::submit(Submission&& submission, const std::function<std::string()>& where) {
  auto operation = std::make_shared<Operation>(std::move(submission));
  Submission& s = operation->submission;
  std::unique_lock lock(mutex_);
  check(s);
  operation->position = *sets_.position(s.process_set, rank_);
  if (s.op == ReduceOp::kAverage && reduces(s.kind)) {
    s.op = ReduceOp::kSum;
    s.scale.post /= static_cast<double>(sets_.members(s.process_set).size());
  }
  operation->announced_as = cache_.find(s, operation->position);
  operation->cache_version = cache_version_;
  if (!operation->announced_as && where && s.where.empty()) {
    lock.unlock();
    s.where = where();
    lock.lock();
    check_membership(s);  // it may have changed meanwhile
  }
  if (closed_) throw Failure(*closed_);
  auto it = in_flight_.end();
  if (s.turn == 0) {
    it = in_flight_.find(Key{s.process_set, s.name});
    if (it != in_flight_.end() && !s.queue_duplicates) {
      invalid(s,
              "an operation of this name is in flight; synchronize() it first or use another name");
    }
  }
  claim_memory(*operation);
  if (s.turn == kNextTurn) number(s);
  // Another operation may have the same name; this one waits for it.
  if (s.turn != 0) it = in_flight_.find(Key{s.process_set, s.name});
  submitted_.fetch_add(1, std::memory_order_relaxed);
  recorder_.on_submit(*operation);
  if (s.kind == OpKind::kJoin) joined_ = true;
  if (it != in_flight_.end()) {
    waiting_[{s.process_set, s.name}].push_back(operation);
    return operation;
  }
  in_flight_.emplace(Key{s.process_set, s.name}, operation);
  pending_.store(static_cast<int>(in_flight_.size()), std::memory_order_relaxed);
  unannounced_.push_back(operation);
  news_.fetch_add(1);
  return operation;
}

void OpQueue::announce(Report& report) {
  std::lock_guard lock(mutex_);
  const Ticks now = ticks_now();
  std::size_t unhurried = 0;
  for (const OperationPtr& operation : unannounced_) {
    if (operation->cache_version != cache_version_) {
      operation->announced_as = cache_.find(operation->submission, operation->position);
    }
    operation->announced = true;
    if (is_unhurried(operation->submission.name)) {
      ++unhurried;
    } else {
      recorder_.on_announce(*operation, now);
    }
    if (operation->announced_as) {
      if (const Turn turn = operation->submission.turn; turn != 0) {
        report.subtree_turns.push_back({0, *operation->announced_as, turn});
      } else {
        report.subtree_hits.push_back(*operation->announced_as);
      }
      cache_hits_.fetch_add(1, std::memory_order_relaxed);
    } else {
      report.requests.push_back(request_of(*operation));
    }
  }
  waits_.on_announce(unannounced_.size() - unhurried, now);
  unannounced_.clear();
  news_.store(0);
}

void OpQueue::announce_in_full(CacheId id, Turn turn, Report& report) {
  std::lock_guard lock(mutex_);
  for (const auto& [key, operation] : in_flight_) {
    if (!operation->announced || operation->agreed || operation->announced_as != id) continue;
    if (operation->submission.turn != turn) continue;
    operation->announced_as.reset();
    report.requests.push_back(request_of(*operation));
    return;
  }
}

OperationPtr OpQueue::find(ProcessSetId set, std::string_view name) {
  std::lock_guard lock(mutex_);
  const auto it = in_flight_.find(Key{set, name});
  return it == in_flight_.end() ? nullptr : it->second;
}

void OpQueue::retire(const OperationPtr& operation) {
  const Submission& s = operation->submission;
  std::lock_guard lock(mutex_);
  release_memory(*operation);
  if (s.kind == OpKind::kJoin) joined_ = false;
  const auto it = in_flight_.find(Key{s.process_set, s.name});
  if (it == in_flight_.end() || it->second != operation) return;
  const auto queue = waiting_.empty() ? waiting_.end() : waiting_.find({s.process_set, s.name});
  if (queue == waiting_.end()) {
    in_flight_.erase(it);
    pending_.store(static_cast<int>(in_flight_.size()), std::memory_order_relaxed);
    return;
  }
  auto entry = in_flight_.extract(it);
  entry.mapped() = std::move(queue->second.front());
  entry.key().name = entry.mapped()->submission.name;
  unannounced_.push_back(entry.mapped());
  in_flight_.insert(std::move(entry));
  news_.fetch_add(1);
  queue->second.pop_front();
  if (queue->second.empty()) waiting_.erase(queue);
}

std::vector<OperationPtr> OpQueue::close(Error error) {
  std::lock_guard lock(mutex_);
  if (!closed_) closed_ = std::move(error);
  std::vector<OperationPtr> pending;
  for (auto& [key, operation] : in_flight_) pending.push_back(operation);
  for (auto& [key, queue] : waiting_) pending.insert(pending.end(), queue.begin(), queue.end());
  in_flight_.clear();
  pending_.store(0, std::memory_order_relaxed);
  waiting_.clear();
  unannounced_.clear();
  news_.store(0);
  return pending;
}

void OpQueue::expect_close(const Error& error) {
  std::lock_guard lock(mutex_);
  if (!expected_) expected_ = error;
}

Error OpQueue::closed_by() const {
  std::lock_guard lock(mutex_);
  return closed_ ? *closed_ : expected_.value();
}

ProcessSetId OpQueue::add_process_set(std::vector<int> ranks) {
  std::lock_guard lock(mutex_);
  return sets_.add(std::move(ranks));
}

void OpQueue::remove_process_set(ProcessSetId id) {
  std::lock_guard lock(mutex_);
  if (sets_.contains(id)) sets_.remove(id);
  std::erase_if(turns_, [id](const auto& item) { return item.first.first == id; });
}

std::map<ProcessSetId, std::vector<int>> OpQueue::process_sets() const {
  std::lock_guard lock(mutex_);
  std::map<ProcessSetId, std::vector<int>> found;
  for (const ProcessSetId id : sets_.ids()) {
    const std::span<const int> members = sets_.members(id);
    found[id].assign(members.begin(), members.end());
  }
  return found;
}

std::uint64_t OpQueue::settle_removal() {
  std::lock_guard lock(mutex_);
  return sets_.settle_removal();
}

void OpQueue::record(Operation& operation) {
  std::lock_guard lock(mutex_);
  recorder_.on_submit(operation);
}

bool OpQueue::has_joined() const {
  std::lock_guard lock(mutex_);
  return joined_;
}

bool OpQueue::has_announced() const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(in_flight_, [](const auto& item) { return item.second->announced; });
}

std::vector<std::string> OpQueue::in_flight() const {
  std::vector<std::string> names;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, operation] : in_flight_) {
      const Submission& submission = operation->submission;
      if (!is_unhurried(submission.name)) names.push_back(describe(submission));
    }
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace polyhvd
