#include "nccl/offer.h"

#include <algorithm>
#include <map>
#include <vector>

#include "nccl/library.h"

namespace polyhvd::nccl {
namespace {

// As many as one can read.
constexpr std::size_t kReasonsMax = 8;

// What another rank has sent; between hosts, its last zero may have been changed on the way.
template <std::size_t n>
std::string text_of(const std::array<char, n>& from) {
  return {from.begin(), std::ranges::find(from, '\0')};
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (std::size_t i = 0; i < std::min(parts.size(), kReasonsMax); ++i) {
    text += (i > 0 ? "; " : "") + parts[i];
  }
  if (parts.size() <= kReasonsMax) return text;
  return text + "; and " + std::to_string(parts.size() - kReasonsMax) + " more";
}

}  // namespace

std::optional<std::string> objection(std::span<const Offer> offers,
                                     const std::function<std::string(std::size_t)>& name_of) {
  std::vector<std::string> reasons;
  std::map<std::string, std::size_t> first_on;  // by GPU
  bool may_share = true;
  for (const Offer& offer : offers) {
    may_share = may_share && offer.shares_gpus != 0 && offer.version >= kVersionOfSharedGpus;
  }
  for (std::size_t i = 0; i < offers.size(); ++i) {
    const Offer& offer = offers[i];
    if (offer.version == 0) {
      reasons.push_back(name_of(i) + " has no NCCL: " + text_of(offer.reason));
      continue;
    }
    if (offers[0].version != 0 && offer.version != offers[0].version) {
      reasons.push_back(name_of(i) + " has NCCL " + version_text(offer.version) + ", and " +
                        name_of(0) + " " + version_text(offers[0].version) +
                        "; install the same version for all");
    }
    const auto [it, is_new] = first_on.emplace(text_of(offer.gpu), i);
    if (is_new || may_share) continue;
    reasons.push_back(name_of(it->second) + " and " + name_of(i) + " use the same GPU (" +
                      it->first + "); assign one to each rank, or use NCCL " +
                      version_text(kVersionOfSharedGpus) +
                      " or later with NCCL_MULTI_RANK_GPU_ENABLE=1");
  }
  if (reasons.empty()) return std::nullopt;
  return joined(reasons);
}

}  // namespace polyhvd::nccl
