#include "observe/step_meter.h"

#include <utility>

namespace polyhvd {
namespace {

std::uint64_t fingerprint_of(std::string_view name, std::size_t bytes) {
  // FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv: equal in all runs.
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](unsigned char byte) { hash = (hash ^ byte) * 0x100000001b3; };
  for (const char c : name) add(static_cast<unsigned char>(c));
  for (std::size_t rest = bytes; rest > 0; rest >>= 8) add(static_cast<unsigned char>(rest));
  return hash;
}

}  // namespace

void StepMeter::restart() noexcept {
  idle_ = false;
  anchor_.clear();
}

std::optional<StepSample> StepMeter::note(std::string_view name, std::size_t bytes, Time now) {
  if (!on() || idle_) return std::nullopt;
  if (anchor_.empty() || since_anchor_ >= patience_) {
    // One that has not come for so long comes once, or steps are longer than thought.
    if (!anchor_.empty()) patience_ *= 2;
    anchor_ = name;
    since_anchor_ = 0;
    step_ = -1;
    sample_ = {};
    return std::nullopt;
  }
  ++since_anchor_;
  if (step_ >= 0) sample_.bytes += bytes;
  if (step_ == 0) sample_.fingerprint += fingerprint_of(name, bytes);
  if (name != anchor_) return std::nullopt;
  since_anchor_ = 0;
  if (++step_ == 0) begin_ = now;
  if (step_ < steps_) return std::nullopt;
  idle_ = true;
  sample_.steps = steps_;
  sample_.seconds = std::chrono::duration<double>(now - begin_).count();
  return std::exchange(sample_, {});
}

}  // namespace polyhvd
