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
  for (auto& [rank, flights] : posted_) {
    for (auto& flight : flights) {
      if (flight->flying) (void)flight.release();
    }
  }
}

void MpiTransport::post(int to, ConstBytes out) {
  for (std::size_t at = 0; at < out.size(); at += kMessageBytes) {
    const ConstBytes part = out.subspan(at, std::min(kMessageBytes, out.size() - at));
    std::unique_ptr<Flight> flight = spare();
    if (flight->sent.size() < part.size()) flight->sent.resize(part.size());
    std::memcpy(flight->sent.data(), part.data(), part.size());
    flight->flying = true;
    resources_.library().start_send(flight->sent.data(), static_cast<int>(part.size()), to,
                                    resources_.job().communicator(), flight->request);
    posted_[to].push_back(std::move(flight));
    resources_.count(part.size());
    bytes_sent_.fetch_add(part.size(), std::memory_order_relaxed);
  }
}

// Memory that was written to before: what is new is cleared by the system, page by page.
std::unique_ptr<Flight> MpiTransport::spare() {
  if (spares_.empty()) return std::make_unique<Flight>();
  std::unique_ptr<Flight> flight = std::move(spares_.back());
  spares_.pop_back();
  return flight;
}

void MpiTransport::settle(std::size_t most, Deadline deadline) {
  for (auto& [rank, flights] : posted_) {
    for (; flights.size() > most; flights.pop_front()) {
      resources_.await(*flights.front(), deadline);
      spares_.push_back(std::move(flights.front()));
    }
  }
}

void MpiTransport::exchange(int to, ConstBytes out, int from, Bytes in, Deadline deadline) {
  Library& library = resources_.library();
  const Handle all = resources_.job().communicator();
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
      resources_.await(*receiving_, deadline);
      std::memcpy(in.data() + at, receiving_->received.data(), received);
    }
    if (sent > 0) resources_.await(*sending_, deadline);
    resources_.count(sent);
    bytes_sent_.fetch_add(sent, std::memory_order_relaxed);
    bytes_received_.fetch_add(received, std::memory_order_relaxed);
  }
}

}  // namespace polyhvd::mpi
