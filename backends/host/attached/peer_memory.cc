#include "host/attached/peer_memory.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>

namespace polyhvd::host {
namespace {

using Transfer = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long,
                             unsigned long);

std::size_t bytes_of(std::span<const iovec> parts) {
  std::size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

// The next IOV_MAX parts of either side at most, as many bytes of one as of the other.
int transfer(Transfer call, pid_t process, std::span<const iovec> mine,
             std::span<const iovec> theirs) {
  const ssize_t done = call(process, mine.data(), mine.size(), theirs.data(), theirs.size(), 0);
  if (done < 0) return errno;
  return static_cast<std::size_t>(done) == bytes_of(theirs) ? 0 : EFAULT;
}

}  // namespace

int read_memory(pid_t process, std::span<const iovec> theirs, std::byte* to) {
  while (!theirs.empty()) {
    const auto some = theirs.first(std::min<std::size_t>(theirs.size(), IOV_MAX));
    const iovec mine{to, bytes_of(some)};
    if (const int error = transfer(process_vm_readv, process, {&mine, 1}, some)) return error;
    to += mine.iov_len;
    theirs = theirs.subspan(some.size());
  }
  return 0;
}

int write_memory(pid_t process, std::span<const iovec> mine, std::span<const iovec> theirs) {
  // Cut in the same way, so that as many parts are as many bytes.
  while (!theirs.empty()) {
    const std::size_t some = std::min<std::size_t>(theirs.size(), IOV_MAX);
    if (const int error =
            transfer(process_vm_writev, process, mine.first(some), theirs.first(some))) {
      return error;
    }
    mine = mine.subspan(some);
    theirs = theirs.subspan(some);
  }
  return 0;
}

bool is_within_reach(Segments segments) {
  constexpr std::size_t kAtOnce = 64;
  std::array<std::byte, kAtOnce> bytes;
  for (std::size_t at = 0; at < segments.size(); at += kAtOnce) {
    std::array<iovec, kAtOnce> first;
    std::size_t count = 0;
    for (const Segment& segment : segments.subspan(at, std::min(kAtOnce, segments.size() - at))) {
      if (segment.bytes > 0) first[count++] = {segment.data, 1};
    }
    if (read_memory(getpid(), std::span(first).first(count), bytes.data()) != 0) return false;
  }
  return true;
}

void let_siblings_attach() noexcept {
#if defined(PR_SET_PTRACER)
  // Without Yama this fails. Everything descends from process 1.
  if (getppid() > 1) prctl(PR_SET_PTRACER, static_cast<unsigned long>(getppid()), 0, 0, 0);
#endif
}

}  // namespace polyhvd::host
