#include "mpi/mpi_backend.h"

#include <sched.h>

#include <chrono>
#include <thread>

#include "mpi/mpi_communicator.h"
#include "mpi/mpi_transport.h"

namespace polyhvd::mpi {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kLooksWithoutYielding = 100;
constexpr auto kAwakeTime = std::chrono::milliseconds(2);
constexpr auto kNap = std::chrono::microseconds(20);

}  // namespace

Fabric::Fabric(std::shared_ptr<Session> session, const host::Fabric& host)
    : session_(std::move(session)), host_(host), reductions_(library()) {
  transport_ = std::make_unique<MpiTransport>(*this);
  bytes_only_.rank = host.rank;
  for (int rank = 0; rank < session_->size(); ++rank) {
    bytes_only_.domains.push_back({rank});
    bytes_only_.domain_of.push_back(rank);
  }
  bytes_only_.transport = transport_.get();
  bytes_only_.parking = host.parking;
  bytes_only_.reproducible = true;
  bytes_only_.overlap = [this] { overlap(); };
}

Fabric::~Fabric() {
  if (usable()) reductions_.close();
}

// MPI has no descriptor that could be watched: it moves when it is asked, so that a wait is
// one question after the other, with naps once it takes long.
void Fabric::await(Flight& flight, Deadline deadline) {
  class Asking {
   public:
    explicit Asking(Parking& parking) : parking_(parking) { parking_.set_asking(true); }
    ~Asking() { parking_.set_asking(false); }
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;

   private:
    Parking& parking_;
  } const asking(*host_.parking);
  int looks = 0;
  Clock::time_point nap_from{};
  host_.parking->await(
      [&] {
        if (library().test(flight.request)) {
          flight.flying = false;
          return true;
        }
        if (++looks < kLooksWithoutYielding) return false;
        const auto now = Clock::now();
        if (looks == kLooksWithoutYielding) nap_from = now + kAwakeTime;
        if (now < nap_from) {
          sched_yield();
        } else {
          std::this_thread::sleep_for(kNap);
        }
        return false;
      },
      deadline);
}

// Depends on what all ranks have in common alone: they have to choose alike.
bool MpiBackend::supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const {
  if (fabric_.reproducible()) return bytes_only_.supports(kind, dtype, op, device);
  return bytes_only_.supports(kind, dtype, op, device) &&
         (!reduces(kind) || op != ReduceOp::kAdasum);
}

std::unique_ptr<Communicator> MpiBackend::connect(ProcessSetId set, std::span<const int> members,
                                                  Communicator* on_cpu) {
  if (fabric_.reproducible()) return bytes_only_.connect(set, members, on_cpu);
  return std::make_unique<MpiCommunicator>(fabric_, set, members);
}

}  // namespace polyhvd::mpi
