// N engines in one process, as one job: ranks are threads. Descriptors are made
// here instead of by the bootstrap; "TCP" connections are socket pairs.
#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "shm/segment.h"
#include "world.h"

namespace polyhvd::test {

using Layout = std::vector<std::vector<int>>;  // ranks by host

inline Layout one_host(int size) {
  Layout layout(1);
  for (int r = 0; r < size; ++r) layout[0].push_back(r);
  return layout;
}

// A key for one direction of one connection.
inline Key key_of(int from, int to, int connection) {
  Key key{};
  const int words[] = {from, to, connection};
  std::memcpy(key.data(), words, sizeof words);
  return key;
}

class ThreadWorld {
 public:
  explicit ThreadWorld(const Layout& layout, std::vector<std::vector<int>> process_sets = {},
                       const std::function<void(EngineOptions&)>& adjust = {},
                       const std::function<void(Connections&)>& adjust_wiring = {},
                       int victim = -1) {
    for (const auto& host : layout) size_ += static_cast<int>(host.size());
    std::vector<Connections> all_connections(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) {
      Connections& w = all_connections[static_cast<std::size_t>(r)];
      w.rank = r;
      w.size = size_;
      w.domains = layout;
      w.labels.assign(static_cast<std::size_t>(size_), "a thread");
      w.process_sets = process_sets;
      if (adjust_wiring) adjust_wiring(w);
    }
    using Fds = std::map<int, int> Connections::*;
    using Keys = std::map<int, SessionKeys> Connections::*;
    const auto pair = [&](Fds map, Keys keys, int a, int b) {
      int fds[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
        throw std::runtime_error("socketpair");
      }
      Connections& of_a = all_connections[static_cast<std::size_t>(a)];
      Connections& of_b = all_connections[static_cast<std::size_t>(b)];
      (of_a.*map)[b] = fds[0];
      (of_b.*map)[a] = fds[1];
      if (keys == nullptr) return;
      const SessionKeys made{key_of(a, b, fds[0]), key_of(b, a, fds[0])};
      (of_a.*keys)[b] = made;
      (of_b.*keys)[a] = {made.receive, made.send};
    };
    std::vector<int> host_of(static_cast<std::size_t>(size_));
    for (std::size_t h = 0; h < layout.size(); ++h) {
      for (const int r : layout[h]) host_of[static_cast<std::size_t>(r)] = static_cast<int>(h);
      const int parent = tree_parent(static_cast<int>(h));
      if (parent >= 0) {
        pair(&Connections::control_fds, &Connections::control_keys, layout[h][0],
             layout[static_cast<std::size_t>(parent)][0]);
      }
      if (layout[h].size() < 2) continue;
      const int fd = memfd_create("polyhvd-test", MFD_CLOEXEC);
      const std::size_t bytes = shm::Segment::bytes(static_cast<int>(layout[h].size()));
      if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
        throw std::runtime_error("memfd_create");
      }
      for (const int r : layout[h])
        all_connections[static_cast<std::size_t>(r)].segment_fd = dup(fd);
      segments_.push_back(
          {layout[h], std::make_unique<shm::Segment>(fd, static_cast<int>(layout[h].size()))});
      close(fd);
    }
    for (int a = 0; a < size_; ++a) {
      for (int b = a + 1; b < size_; ++b) {
        const bool together =
            host_of[static_cast<std::size_t>(a)] == host_of[static_cast<std::size_t>(b)];
        if (together) {
          pair(&Connections::local_fds, nullptr, a, b);
        } else {
          pair(&Connections::data_fds, &Connections::data_keys, a, b);
        }
      }
    }
    if (victim >= 0) {
      const Connections& w = all_connections[static_cast<std::size_t>(victim)];
      for (const auto* fds : {&w.local_fds, &w.control_fds, &w.data_fds}) {
        for (const auto& [rank, fd] : *fds) ends_of_victim_.push_back(dup(fd));
      }
    }
    EngineOptions options;
    options.crowded = true;  // ranks are threads: more of them than cores
    options.stalls.patience = options.data_timeout;
    if (adjust) adjust(options);
    for (Connections& w : all_connections) engines_.push_back(make_engine(std::move(w), options));
  }

  int size() const { return size_; }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  void destroy(int rank) { engines_[static_cast<std::size_t>(rank)].reset(); }

  // Every connection of the victim ends, as those of a process do that is killed. Once.
  void cut() {
    for (const int fd : ends_of_victim_) {
      ::shutdown(fd, SHUT_RDWR);
      close(fd);
    }
    ends_of_victim_.clear();
  }
  // On the first host, whose ranks are in a row.
  std::uint32_t life(int rank) const {
    const auto& [ranks, segment] = segments_.front();
    return segment->life(rank - ranks.front()).load();
  }
  // Has a rank's word say what the kernel writes when its process dies; nothing is closed.
  void mark_dead(int rank) {
    for (const auto& [ranks, segment] : segments_) {
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        if (ranks[i] != rank) continue;
        std::atomic<std::uint32_t>& word = segment->life(static_cast<int>(i));
        // Its thread may be about to take it.
        while (word.load() == 0) std::this_thread::yield();
        word.store(FUTEX_WAITERS | FUTEX_OWNER_DIED);
        syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
      }
    }
  }
  ~ThreadWorld() { cut(); }
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  // Runs `body(rank, engine)` on a thread per rank; throws what any of them have thrown.
  void run(const std::function<void(int, Engine&)>& body) {
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::string errors;
    std::exception_ptr other;  // doctest's, after a REQUIRE
    for (int r = 0; r < size_; ++r) {
      threads.emplace_back([&, r] {
        try {
          body(r, engine(r));
        } catch (const std::exception& error) {
          std::lock_guard lock(mutex);
          errors += "\n  rank " + std::to_string(r) + ": " + error.what();
        } catch (...) {
          std::lock_guard lock(mutex);
          other = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (other) std::rethrow_exception(other);
    if (!errors.empty()) throw std::runtime_error(errors);
  }

  // All ranks leave, each on its own thread, as processes would.
  void shutdown() {
    run([](int, Engine& engine) { engine.shutdown(); });
  }

 private:
  int size_ = 0;
  std::vector<int> ends_of_victim_;
  std::vector<std::pair<std::vector<int>, std::unique_ptr<shm::Segment>>> segments_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

template <class T>
TensorView view(std::vector<T>& values, DType dtype) {
  return {values.data(), {static_cast<std::int64_t>(values.size())}, dtype, {}};
}

inline Submission allreduce(std::string name, std::vector<float>& values,
                            ReduceOp op = ReduceOp::kSum, ProcessSetId set = kWorld) {
  Submission s;
  s.name = std::move(name);
  s.op = op;
  s.process_set = set;
  s.inputs = {view(values, DType::kFloat32)};
  s.outputs = s.inputs;
  return s;
}

}  // namespace polyhvd::test
