#include "mpi/mpi_transport.h"

#include <algorithm>
#include <cstring>

namespace polyhvd::mpi {
namespace {

constexpr std::size_t kMessageBytes = 4 << 20;

}  // namespace

MpiTransport::~MpiTransport() {
  // What still flies belongs to MPI, for as long as the process lives.
  if (sending_->flying) (void)sending_.release();
  if (receiving_->flying) (void)receiving_.release();
}

void MpiTransport::exchange(int to, ConstBytes out, int from, Bytes in, Deadline deadline) {
  Library& library = fabric_.library();
  const Handle all = fabric_.session().communicator();
  for (std::size_t at = 0; at < std::max(out.size(), in.size()); at += kMessageBytes) {
    const std::size_t sent = at < out.size() ? std::min(kMessageBytes, out.size() - at) : 0;
    const std::size_t received = at < in.size() ? std::min(kMessageBytes, in.size() - at) : 0;
    if (received > 0) {
      receiving_->received.resize(std::max(receiving_->received.size(), received));
      receiving_->flying = true;
      library.start_receive(receiving_->received.data(), static_cast<int>(received), from, all,
                            receiving_->request);
    }
    if (sent > 0) {
      sending_->sent.resize(std::max(sending_->sent.size(), sent));
      std::memcpy(sending_->sent.data(), out.data() + at, sent);
      sending_->flying = true;
      library.start_send(sending_->sent.data(), static_cast<int>(sent), to, all, sending_->request);
    }
    if (received > 0) {
      fabric_.await(*receiving_, deadline);
      std::memcpy(in.data() + at, receiving_->received.data(), received);
    }
    if (sent > 0) fabric_.await(*sending_, deadline);
    fabric_.count(sent);
    bytes_sent_.fetch_add(sent, std::memory_order_relaxed);
    bytes_received_.fetch_add(received, std::memory_order_relaxed);
  }
}

}  // namespace polyhvd::mpi
