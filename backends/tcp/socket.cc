#include "tcp/socket.h"

#include <fcntl.h>
#include <unistd.h>

namespace polyhvd::tcp {

Socket::Socket(int fd) : fd_(fd) {
  const int flags = fcntl(fd_, F_GETFL);
  fcntl(fd_, F_SETFL, flags | O_NONBLOCK);
  fcntl(fd_, F_SETFD, FD_CLOEXEC);
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

}  // namespace polyhvd::tcp
