// A connected socket that is closed with its owner.
#pragma once

#include <utility>

namespace polyhvd::tcp {

class Socket {
 public:
  // Takes `fd` over and makes it non-blocking.
  explicit Socket(int fd);
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace polyhvd::tcp
