// Sockets between the ranks of a communicator of the test double of NCCL: a pair for every two
// of them. Names are in the abstract namespace, so that nothing is left behind. Every wait ends
// with abort(), and says so with false, as it does when the peer has gone.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace stand_in {

[[noreturn]] inline void misuse(const char* call, const char* reason) {
  std::fprintf(stderr, "stand-in of NCCL: %s: %s\n", call, reason);
  std::abort();
}

class Links {
 public:
  bool aborted() const { return aborted_.load(); }
  void abort() { aborted_.store(true); }
  void close() {
    for (int& fd : peers_) close_one(fd);
    close_one(listener_);
  }

  // An address at which the first rank, in this process, will meet the others.
  static std::string listen_for_first() {
    const std::string address = new_address();
    const std::lock_guard lock(s_mutex);
    s_first[address] = listen(address);
    return address;
  }

  bool meet(const std::string& first, int rank, int size) {
    peers_.assign(static_cast<std::size_t>(size), -1);
    std::vector<std::string> addresses(static_cast<std::size_t>(size), first);
    if (rank == 0) {
      const std::lock_guard lock(s_mutex);
      const auto found = s_first.find(first);
      if (found == s_first.end()) misuse("ncclCommInitRankConfig", "another process made the id");
      listener_ = found->second;
      s_first.erase(found);
    } else {
      addresses[static_cast<std::size_t>(rank)] = new_address();
      listener_ = listen(addresses[static_cast<std::size_t>(rank)]);
    }
    if (rank > 0 && !call_on(first, 0, rank)) return false;
    if (!tell_addresses(rank, size, addresses)) return false;
    for (int r = 1; r < rank; ++r) {
      if (!call_on(addresses[static_cast<std::size_t>(r)], r, rank)) return false;
    }
    for (int r = rank + 1; rank > 0 && r < size; ++r) {
      if (!answer()) return false;
    }
    return true;
  }

  bool send(int peer, const void* data, std::size_t bytes) {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      if (!await(fd_of(peer), POLLOUT)) return false;
      const ssize_t sent = ::send(fd_of(peer), at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno != EAGAIN) return false;
      if (sent > 0) at += sent, bytes -= static_cast<std::size_t>(sent);
    }
    return true;
  }

  bool receive(int peer, void* data, std::size_t bytes) {
    return receive_from(fd_of(peer), data, bytes);
  }

 private:
  static constexpr std::size_t kAddressBytes = 40;

  static std::string new_address() {
    std::random_device random;
    char text[kAddressBytes];
    std::snprintf(text, sizeof text, "polyhvd-stand-in-%08x%08x", random(), random());
    return text;
  }
  static std::pair<sockaddr_un, socklen_t> name_of(const std::string& address) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, address.data(), address.size());
    return {name, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size())};
  }
  static int listen(const std::string& address) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const auto [name, bytes] = name_of(address);
    if (bind(fd, reinterpret_cast<const sockaddr*>(&name), bytes) != 0 || ::listen(fd, 64) != 0) {
      misuse("a socket", std::strerror(errno));
    }
    return fd;
  }
  static void close_one(int& fd) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }

  int fd_of(int peer) const { return peers_.at(static_cast<std::size_t>(peer)); }

  bool await(int fd, short events) const {
    pollfd p{fd, events, 0};
    while (!aborted()) {
      if (poll(&p, 1, 5) > 0) return true;
    }
    return false;
  }
  bool receive_from(int fd, void* data, std::size_t bytes) const {
    auto* at = static_cast<char*>(data);
    while (bytes > 0) {
      if (!await(fd, POLLIN)) return false;
      const ssize_t got = recv(fd, at, bytes, MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
      if (got > 0) at += got, bytes -= static_cast<std::size_t>(got);
    }
    return true;
  }
  bool call_on(const std::string& address, int peer, int rank) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const auto [name, bytes] = name_of(address);
    peers_[static_cast<std::size_t>(peer)] = fd;
    return connect(fd, reinterpret_cast<const sockaddr*>(&name), bytes) == 0 &&
           send(peer, &rank, sizeof rank);
  }
  bool answer() {
    if (!await(listener_, POLLIN)) return false;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    int rank = 0;
    if (!receive_from(fd, &rank, sizeof rank)) {
      ::close(fd);
      return false;
    }
    int& place = peers_.at(static_cast<std::size_t>(rank));
    if (place != -1) misuse("ncclCommInitRankConfig", "two ranks with one number");
    place = fd;
    return true;
  }
  // The first rank hears where each one listens, and tells all.
  bool tell_addresses(int rank, int size, std::vector<std::string>& addresses) {
    std::vector<char> all(kAddressBytes * static_cast<std::size_t>(size));
    const auto place = [&](int r) {
      return all.data() + kAddressBytes * static_cast<std::size_t>(r);
    };
    if (rank > 0) {
      const std::string& mine = addresses[static_cast<std::size_t>(rank)];
      std::memcpy(place(rank), mine.data(), mine.size());
      if (!send(0, place(rank), kAddressBytes) || !receive(0, all.data(), all.size())) return false;
    } else {
      for (int r = 1; r < size; ++r) {
        if (!answer()) return false;
      }
      for (int r = 1; r < size; ++r) {
        if (!receive(r, place(r), kAddressBytes)) return false;
      }
      for (int r = 1; r < size; ++r) {
        if (!send(r, all.data(), all.size())) return false;
      }
    }
    for (int r = 1; r < size; ++r) addresses[static_cast<std::size_t>(r)] = place(r);
    return true;
  }

  static inline std::mutex s_mutex;
  static inline std::map<std::string, int> s_first;  // listeners of ids; guarded by s_mutex

  std::atomic<bool> aborted_{false};
  int listener_ = -1;
  std::vector<int> peers_;
};

}  // namespace stand_in
