// Puts an engine together from descriptors: the one place, beside bindings.cc and
// the tests, that sees all concrete classes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "control/mac.h"
#include "engine/engine.h"

namespace polyhvd {

namespace mpi {
class JobCommunicator;
}

// What connects a rank to the others; see polyhvd/runtime/connections.py, its Python form.
// Descriptors are taken over.
struct Connections {
  int rank = 0;
  int size = 1;
  std::vector<std::vector<int>> domains{{0}};
  std::vector<std::string> labels{"this process"};
  std::vector<int> pids;  // of ranks on this host, by rank; 0: another host, or unknown
  int segment_fd = -1;
  std::map<int, int> local_fds;
  std::map<int, int> control_fds;
  std::map<int, int> data_fds;
  std::map<int, SessionKeys> control_keys;  // of each of control_fds, agreed on by its handshake
  std::map<int, SessionKeys> data_keys;     // likewise
  std::vector<std::vector<int>> process_sets;
  // First choice first; "mpi:allreduce+broadcast" is one for only these operations, and "nccl?"
  // one that need not be found.
  std::vector<std::string> backends{"host"};
  std::shared_ptr<mpi::JobCommunicator> mpi;  // all ranks in their order; may be null
  std::vector<std::string> nccl_libraries;    // where NCCL may be, the likeliest first
  bool shares_gpus = false;                   // NCCL_MULTI_RANK_GPU_ENABLE is set
  bool hierarchical = false;                  // NCCL reduces within hosts, CPUs between them
  bool watches_deaths = true;                 // see shm::DeathWatch; the same on all ranks
};

// Parent of a domain in the control tree; -1 for domain 0. As tree_parent() of connections.py.
int tree_parent(int domain) noexcept;

std::unique_ptr<Engine> make_engine(Connections connections, EngineOptions options);

}  // namespace polyhvd
