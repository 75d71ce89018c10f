// The way of a small tensor that all ranks know, from submit to done, again and
// again: what `make instructions` counts the instructions of. Two worlds: one rank,
// where all is the queue's own work, and two ranks that agree through shared memory.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../tests/core/thread_world.h"

namespace polyhvd {
namespace {

constexpr int kWarmUpCalls = 50;

// callgrind collects only in this function, by its name.
[[gnu::noinline]] void counted_calls(Engine& engine, std::vector<float>& values, int calls) {
  for (int i = 0; i < calls; ++i) {
    engine.wait(engine.submit(test::allreduce("gradient", values), true));
  }
}

void other_calls(Engine& engine, std::vector<float>& values, int calls) {
  for (int i = 0; i < calls; ++i) {
    engine.wait(engine.submit(test::allreduce("gradient", values), true));
  }
}

void run(int ranks, int calls) {
  test::ThreadWorld world(test::one_host(ranks));
  world.run([calls](int rank, Engine& engine) {
    std::vector<float> values(256, 0.0F);
    other_calls(engine, values, kWarmUpCalls);
    if (rank == 0) {
      counted_calls(engine, values, calls);
    } else {
      other_calls(engine, values, calls);
    }
  });
  world.shutdown();
}

}  // namespace
}  // namespace polyhvd

int main(int argc, char** argv) {
  if (argc != 3 || std::atoi(argv[1]) < 1 || std::atoi(argv[2]) < 1) {
    std::fprintf(stderr, "usage: instructions RANKS CALLS\n");
    return 2;
  }
  polyhvd::run(std::atoi(argv[1]), std::atoi(argv[2]));
  return 0;
}
