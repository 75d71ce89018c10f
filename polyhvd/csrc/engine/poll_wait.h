// Waits for what no descriptor announces, such as MPI or a GPU: it has to be polled, and what
// else ends a wait is checked between the polls.
#pragma once

#include <sched.h>

#include <chrono>
#include <thread>

#include "engine/parking.h"

namespace polyhvd {

// Returns when `ready()` is true, after naps once it takes long. Throws as Parking does, and
// what `ready` throws. Role's holder only.
template <class Ready>
void poll_wait(Parking& parking, Ready&& ready, Parking::Clock::time_point deadline) {
  constexpr int kLooksWithoutYielding = 100;
  constexpr auto kAwakeTime = std::chrono::milliseconds(2);
  constexpr auto kNap = std::chrono::microseconds(20);
  class Asking {
   public:
    explicit Asking(Parking& parking) : parking_(parking) { parking_.set_polling(true); }
    ~Asking() { parking_.set_polling(false); }
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;

   private:
    Parking& parking_;
  } const asking(parking);
  int looks = 0;
  Parking::Clock::time_point nap_from{};
  parking.await(
      [&] {
        if (ready()) return true;
        if (++looks < kLooksWithoutYielding) return false;
        const auto now = Parking::Clock::now();
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

}  // namespace polyhvd
