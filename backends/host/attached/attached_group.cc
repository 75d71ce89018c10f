// A rank that leaves in the middle must not be written to any more, for its tensors may be
// freed: it closes its memory, which writers look at before each chunk (LocalGroup::close).
#include "host/attached/attached_group.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "host/kernels.h"
#include "host/slices.h"

namespace polyhvd::host {
namespace {

// What a rank puts into its region for the others, once and with every reduction.
struct Passport {
  std::uint64_t token;
  std::uint64_t token_address;
};
struct Addresses {
  std::uint64_t in;
  std::uint64_t out;
};

template <class T>
void put(std::byte* region, std::size_t index, const T& value) {
  std::memcpy(region + index * sizeof(T), &value, sizeof(T));
}
template <class T>
T get(const std::byte* region, std::size_t index) {
  T value;
  std::memcpy(&value, region + index * sizeof(T), sizeof(T));
  return value;
}

std::uint64_t address_of(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

// Of another process: never to be read here.
std::byte* theirs(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

std::byte* bytes_of(std::uint64_t& word) { return reinterpret_cast<std::byte*>(&word); }

// Sizes within a factor of two, of few tensors or of many, are weighed together.
constexpr std::size_t kManySegments = 16;
constexpr std::size_t kWeighedClasses = 2 * 64;
std::size_t weighed_class(std::size_t bytes, std::size_t segments) {
  return 2 * static_cast<std::size_t>(std::bit_width(bytes) - 1) + (segments > kManySegments);
}

}  // namespace

Way AttachedGroup::begin(const Reduction& r) {
  if (*attaching_ == Attaching::kAlways) return Way::kAttached;
  const std::size_t index = weighed_class(r.bytes, r.in.size());
  const std::uint64_t step = group_.step();
  group_.await_free(step, r.deadline);
  group_.note(step, before_.ticks);
  now_ = {index, ways_[index].next(), r.bytes, Ticks{0} - ticks_now()};
  return now_.way;
}

void AttachedGroup::end() {
  if (*attaching_ == Attaching::kAlways) return;
  now_.ticks += ticks_now();
  before_ = now_;
  now_ = {};
}

// Waits for all to begin the first step of a reduction.
void AttachedGroup::meet(std::uint64_t step, Deadline deadline) {
  now_.ticks += ticks_now();
  group_.await_begun(step, deadline);
  now_.ticks -= ticks_now();
  weigh(step);
}

// All ranks come to the same choice, since they know the same costs of the reduction before.
void AttachedGroup::weigh(std::uint64_t step) {
  if (before_.bytes == 0) return;
  Ticks slowest = before_.ticks;
  for (int m = 0; m < group_.size(); ++m) {
    if (m != group_.self()) slowest = std::max<Ticks>(slowest, group_.note_of(m, step));
  }
  ways_[before_.index].note(before_.way,
                            static_cast<float>(slowest) / static_cast<float>(before_.bytes));
}

// Agrees, once, on whether all can get at each other's memory.
Attaching AttachedGroup::agree(Deadline deadline) {
  const shm::Staging& staging = group_.staging();
  const std::uint64_t step = group_.step();
  bool possible = resources_.attaching != Attaching::kNever;
  if (possible) let_siblings_attach();
  token_ = ticks_now() ^ address_of(this) ^ static_cast<std::uint64_t>(resources_.rank) << 48;
  group_.await_free(step, deadline);
  put(staging.region(group_.self(), step), 0, Passport{token_, address_of(&token_)});
  group_.publish_begun(step, 0);
  group_.await_begun(step, deadline);
  for (int m = 0; m < group_.size(); ++m) {
    if (m == group_.self()) continue;
    const auto rank = static_cast<std::size_t>(rank_of(m));
    Neighbour& neighbour = neighbours_.emplace_back();
    neighbour.member = m;
    neighbour.process = rank < resources_.pids.size() ? resources_.pids[rank] : 0;
    const auto passport = get<Passport>(staging.region(m, step), 0);
    neighbour.token = {theirs(passport.token_address), sizeof token_};
    std::uint64_t found = 0;
    possible = possible && neighbour.process > 0 &&
               read_memory(neighbour.process, {&neighbour.token, 1}, bytes_of(found)) == 0 &&
               found == passport.token;
  }
  const Attaching mine = possible ? resources_.attaching : Attaching::kNever;
  group_.note(step, static_cast<std::uint64_t>(mine));
  group_.publish_reduced(step);
  attaching_ = mine;
  for (const Neighbour& neighbour : neighbours_) {
    group_.await_reduced_by(neighbour.member, step, deadline);
    attaching_ =
        std::min(*attaching_, static_cast<Attaching>(group_.note_of(neighbour.member, step)));
  }
  group_.advance();
  if (*attaching_ == Attaching::kAuto) ways_.assign(kWeighedClasses, CostChoice<Way>(kHabit));
  return *attaching_;
}

// Sends the others the addresses of this rank's tensors, and stores theirs do. False if one of
// them has some that cannot be had, or had better be staged: so it is for all. Results that lie
// apart are not faster so: only the rank itself can write them past the caches.
bool AttachedGroup::exchange_addresses(const Reduction& r) {
  const shm::Staging& staging = group_.staging();
  const std::uint64_t step = group_.step();
  const std::size_t entries = r.in.size() + 1;
  if (entries * sizeof(Addresses) > staging.region_bytes()) return false;
  const bool in_place = std::ranges::equal(r.in, r.out, {}, &Segment::data, &Segment::data);
  const bool ready = is_within_reach(r.in) &&
                     (in_place || (*attaching_ == Attaching::kAlways && is_within_reach(r.out)));
  group_.await_free(step, r.deadline);
  std::byte* mine = staging.region(group_.self(), step);
  put(mine, 0, Addresses{ready, ready});
  for (std::size_t i = 0; i < r.in.size(); ++i) {
    put(mine, i + 1, Addresses{address_of(r.in[i].data), address_of(r.out[i].data)});
  }
  group_.publish_begun(step, 0);
  is_weighing() ? meet(step, r.deadline) : group_.await_begun(step, r.deadline);
  bool all_ready = ready;
  for (Neighbour& neighbour : neighbours_) {
    const std::byte* table = staging.region(neighbour.member, step);
    all_ready = all_ready && get<Addresses>(table, 0).in != 0;
    neighbour.in.assign(r.in.begin(), r.in.end());
    neighbour.out.assign(r.in.begin(), r.in.end());
    for (std::size_t i = 0; i < r.in.size(); ++i) {
      const auto at = get<Addresses>(table, i + 1);
      neighbour.in[i].data = theirs(at.in);
      neighbour.out[i].data = theirs(at.out);
    }
  }
  if (!all_ready) group_.advance();
  return all_ready;
}

bool AttachedGroup::reduce(const Reduction& r) {
  const std::uint64_t step = group_.step();
  try {
    if (!exchange_addresses(r)) {
      now_.bytes = 0;  // what is reduced now is none of the ways that are weighed
      return false;
    }
    reduce_own_slice(r, step);
    group_.publish_reduced(step);
    for (const Neighbour& neighbour : neighbours_) {
      group_.await_reduced_by(neighbour.member, step, r.deadline);
    }
  } catch (...) {
    group_.close(step, [&](int member) {
      const Neighbour& writer = *std::ranges::find(neighbours_, member, &Neighbour::member);
      std::uint64_t token = 0;
      return read_memory(writer.process, {&writer.token, 1}, bytes_of(token)) != 0;
    });
    throw;
  }
  group_.advance();
  return true;
}

// All neighbours' terms together stay in the second-level cache, if there are not too many. Twice
// the chunks of the staging area, as there is but one place for them, and two system calls each.
std::size_t AttachedGroup::chunk_bytes() const noexcept {
  constexpr std::size_t kTermsBytes = 1 << 20;
  constexpr std::size_t kLeast = 16 << 10;
  const std::size_t each = std::max(kLeast, kTermsBytes / neighbours_.size());
  const std::size_t tuned = std::max(resources_.tuning.chunk_bytes, kChunkBytesMin);
  return std::min(each, 2 * tuned);
}

void AttachedGroup::reduce_own_slice(const Reduction& r, std::uint64_t step) {
  const std::size_t item = item_size(r.dtype);
  const int self = group_.self();
  const Slices slices(r.bytes, item, group_.size(), chunk_bytes());
  Cursor mine(r.in, r.out, slices.begin(self));
  const bool apart = r.passes_caches();
  std::vector<Cursor> reading;
  for (const Neighbour& neighbour : neighbours_) {
    reading.emplace_back(neighbour.in, neighbour.out, slices.begin(self));
  }
  std::vector<Cursor> writing = reading;
  sources_.resize(static_cast<std::size_t>(group_.size()));
  for (std::size_t i = 0; i < slices.steps && slices.bytes_of(self, i) > 0; ++i) {
    const std::size_t bytes = slices.bytes_of(self, i);
    for (std::size_t n = 0; n < neighbours_.size(); ++n) {
      read_terms(neighbours_[n], reading[n], bytes, r.deadline);
    }
    sums_at_.clear();
    mine.take(
        bytes, [&](const std::byte* in, std::byte* out, std::size_t offset, std::size_t count) {
          sources_[static_cast<std::size_t>(self)] = in;
          for (const Neighbour& neighbour : neighbours_) {
            sources_[static_cast<std::size_t>(neighbour.member)] = neighbour.terms.data() + offset;
          }
          std::byte* sums = apart ? neighbours_[0].terms.data() + offset : out;
          host::reduce(r.dtype, r.op, r.scale, sources_, count / item, sums, nullptr);
          if (apart) copy_past_caches(out, sums, count);
          sums_at_.push_back({sums, count});
        });
    for (std::size_t n = 0; n < neighbours_.size(); ++n) {
      write_sums(neighbours_[n], writing[n], bytes, step, r.deadline);
    }
    resources_.overlap();
  }
  const std::uint64_t moved = slices.size(self) * neighbours_.size();
  resources_.shm_bytes.fetch_add(moved, std::memory_order_relaxed);
  resources_.cma_bytes.fetch_add(moved, std::memory_order_relaxed);
}

void AttachedGroup::read_terms(Neighbour& from, Cursor& at, std::size_t bytes, Deadline deadline) {
  if (from.terms.size() < bytes) from.terms.resize(chunk_bytes());
  from.parts.clear();
  at.take(bytes, [&](const std::byte* in, std::byte*, std::size_t, std::size_t count) {
    from.parts.push_back({const_cast<std::byte*>(in), count});
  });
  check(read_memory(from.process, from.parts, from.terms.data()), from, deadline);
}

void AttachedGroup::write_sums(Neighbour& to, Cursor& at, std::size_t bytes, std::uint64_t step,
                               Deadline deadline) {
  to.parts.clear();
  at.take(bytes, [&](const std::byte*, std::byte* out, std::size_t, std::size_t count) {
    to.parts.push_back({out, count});
  });
  int error = 0;
  group_.write_into(to.member, step, [&] { error = write_memory(to.process, sums_at_, to.parts); });
  check(error, to, deadline);
}

void AttachedGroup::check(int error, const Neighbour& with, Deadline deadline) {
  if (error == 0) return;
  const int rank = rank_of(with.member);
  // Who has ended will never get so far; the wait ends as soon as that is noticed.
  if (error == ESRCH) group_.await_reduced_by(with.member, group_.step() + 1, deadline);
  throw Failure(ErrorCode::kInternal,
                "cannot access the tensors of rank " + std::to_string(rank) + " (process " +
                    std::to_string(with.process) + "): " + std::strerror(error) +
                    "; with POLYHVD_CMA=0, ranks exchange tensors through shared memory");
}

}  // namespace polyhvd::host
