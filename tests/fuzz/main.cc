// Usage: fuzz CORPUS SECONDS [SEED]  replay the corpus, then look for new inputs
//        fuzz FILE                   replay one input
//        fuzz --grow CORPUS SECONDS  keep what reaches new code in the corpus
// An input that breaks a promise is left in fuzz-failure.bin, and the status is not 0.
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>

#include "fuzz.h"

namespace polyhvd::fuzz {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kCorpusBytesMax = 512;  // of a file
constexpr std::size_t kStreamEvery = 8;       // inputs for each stream of frames
std::string current;                          // for the last words

void leave_input() {
  std::ofstream("fuzz-failure.bin", std::ios::binary) << current;
  std::fputs("the input is in fuzz-failure.bin; give it to this program to see it again\n", stderr);
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> read_corpus(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const fs::path& path : paths) corpus.push_back(read_file(path));
  if (corpus.empty()) throw std::runtime_error(folder.string() + " is empty");
  return corpus;
}

// Edges that some input has passed.
class Seen {
 public:
  // Whether one of them is new.
  bool add(const std::vector<std::uint32_t>& edges) {
    const std::size_t before = count_;
    for (const std::uint32_t edge : edges) {
      if (!seen_[edge]) ++count_;
      seen_[edge] = true;
    }
    return count_ > before;
  }
  std::size_t count() const { return count_; }

 private:
  std::vector<bool> seen_ = std::vector<bool>(kEdgeCount);
  std::size_t count_ = 0;
};

std::vector<std::uint32_t> try_payload(const std::string& payload, bool counted) {
  current = payload;
  begin_coverage();
  check_payload(payload);
  return edges_passed(counted);
}

class Fuzzer {
 public:
  Fuzzer(std::vector<std::string> corpus, std::uint64_t seed) : random_(seed) {
    for (std::string& payload : corpus) keep_if_new(std::move(payload));
  }

  void run(Clock::duration time) {
    const auto end = Clock::now() + time;
    while (Clock::now() < end) {
      for (std::size_t i = 0; i < kStreamEvery; ++i) {
        keep_if_new(mutate(any(), any(), random_));
        ++tried_;
      }
      const std::vector<std::string> payloads{any(), any(), any()};
      current.clear();
      for (const std::string& payload : payloads) current += payload;
      check_stream(payloads, random_);
    }
  }

  std::size_t tried() const { return tried_; }
  std::size_t edges() const { return seen_.count(); }
  const std::vector<std::string>& pool() const { return pool_; }

 private:
  const std::string& any() { return pool_[below(random_, pool_.size())]; }

  void keep_if_new(std::string payload) {
    if (seen_.add(try_payload(payload, true))) pool_.push_back(std::move(payload));
  }

  Random random_;
  std::vector<std::string> pool_;
  Seen seen_;
  std::size_t tried_ = 0;
};

// The seeds, and the smallest inputs that together pass every edge.
void write_corpus(const fs::path& folder, std::vector<std::string> pool) {
  Seen seen;
  for (const auto& [name, payload] : seed_payloads()) {
    seen.add(try_payload(payload, false));
    std::ofstream(folder / (name + ".bin"), std::ios::binary) << payload;
  }
  std::ranges::stable_sort(pool, {}, &std::string::size);
  for (const std::string& payload : pool) {
    if (payload.size() > kCorpusBytesMax) break;
    if (!seen.add(try_payload(payload, false))) continue;
    char name[40];
    std::snprintf(name, sizeof name, "found-%016zx.bin", std::hash<std::string>{}(payload));
    std::ofstream(folder / name, std::ios::binary) << payload;
  }
}

int run(std::vector<std::string> arguments) {
  const bool grow = !arguments.empty() && arguments[0] == "--grow";
  if (grow) arguments.erase(arguments.begin());
  if (arguments.size() == 1 && fs::is_regular_file(arguments[0])) {
    try_payload(read_file(arguments[0]), false);
    return 0;
  }
  if (arguments.size() < 2)
    throw std::invalid_argument("usage: fuzz [--grow] CORPUS SECONDS [SEED]");
  if (grow) write_corpus(arguments[0], {});
  const std::uint64_t seed =
      arguments.size() > 2 ? std::stoull(arguments[2]) : std::random_device()();
  std::cout << "seed " << seed << std::endl;
  Fuzzer fuzzer(read_corpus(arguments[0]), seed);
  std::cout << fuzzer.pool().size() << " inputs pass " << fuzzer.edges() << " edges" << std::endl;
  fuzzer.run(std::chrono::seconds(std::stoul(arguments[1])));
  std::cout << "tried " << fuzzer.tried() << ": " << fuzzer.pool().size() << " inputs pass "
            << fuzzer.edges() << " edges" << std::endl;
  if (grow) write_corpus(arguments[0], fuzzer.pool());
  return 0;
}

}  // namespace
}  // namespace polyhvd::fuzz

int main(int count, char** arguments) {
  polyhvd::fuzz::begin_counting();
  __sanitizer_set_death_callback(polyhvd::fuzz::leave_input);
  try {
    return polyhvd::fuzz::run({arguments + 1, arguments + count});
  } catch (const std::invalid_argument& error) {
    std::cerr << error.what() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    polyhvd::fuzz::leave_input();
    return 1;
  }
}
