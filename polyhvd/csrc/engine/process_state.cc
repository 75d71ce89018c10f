#include "engine/process_state.h"

#include <unistd.h>

#include <fstream>
#include <string>

namespace polyhvd {

std::optional<ProcessState> process_state(int pid) {
  const std::string folder = "/proc/" + std::to_string(pid);
  std::ifstream file(folder + "/stat");
  std::string line;
  if (!std::getline(file, line)) {
    if (access("/proc/self/stat", R_OK) != 0) return std::nullopt;
    return ProcessState{false, "dead: its process no longer exists"};
  }
  // "812 (name) S ...", and the name may hold anything.
  const std::size_t end = line.rfind(") ");
  if (end == std::string::npos || end + 2 >= line.size()) return std::nullopt;
  switch (line[end + 2]) {
    case 'T':
      return ProcessState{false, "stopped by a signal, such as SIGSTOP or Ctrl-Z; `kill -CONT " +
                                     std::to_string(pid) + "` resumes it"};
    case 't':
      return ProcessState{false, "stopped by a debugger"};
    case 'Z':
    case 'X':
      return ProcessState{false, "dead: its process has ended"};
    case 'D':
      return ProcessState{true, "its process waits for a device or a file system"};
    default:
      return ProcessState{true, "its process exists and is not stopped"};
  }
}

}  // namespace polyhvd
