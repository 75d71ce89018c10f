// Other processes' memory by cross memory attach, process_vm_readv(2) and process_vm_writev(2):
// one copy from a tensor of theirs to one of ours, where a shared segment takes two.
//
// Linux allows it to processes of one user that could trace each other; containers and
// Yama (kernel.yama.ptrace_scope) may not. Memory that a driver mapped, such as what CUDA
// pins, cannot be had so.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <span>

#include "engine/backend.h"

namespace polyhvd::host {

// Both return 0, or errno: ESRCH when the process has ended, EFAULT when a part cannot be had.
int read_memory(pid_t process, std::span<const iovec> theirs, std::byte* to);
int write_memory(pid_t process, std::span<const iovec> mine, std::span<const iovec> theirs);

// Whether other processes can read all of these, judging by the first byte of each.
bool is_within_reach(Segments segments);

// Where Yama lets only ancestors trace, lets the other children of this one's parent.
void let_siblings_attach() noexcept;

}  // namespace polyhvd::host
