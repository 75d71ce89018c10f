#include "nccl/nccl_backend.h"

#include "nccl/nccl_communicator.h"

namespace polyhvd::nccl {

std::shared_ptr<const Library> Resources::library() {
  if (!library_) library_ = open_library(settings.libraries);
  return library_;
}

std::shared_ptr<gpu::OwnStream> Resources::stream(const gpu::ContextPtr& context) {
  if (!stream_) stream_ = std::make_shared<gpu::OwnStream>(context, true);
  return stream_;
}

void Resources::warn(const std::string& text) {
  if (!std::exchange(warned_, true)) log(text);
}

std::unique_ptr<Hierarchy> NcclBackend::hierarchy_of(ProcessSetId set, const Place& place,
                                                     std::span<const int> members) {
  if (!resources_.settings.hierarchical) return nullptr;
  auto levels = levels_of(members, resources_.rank, resources_.host_of);
  if (!levels) return nullptr;
  auto on_cpu = between_hosts_.connect(set, place, levels->across, nullptr);
  auto staged = staged_.connect(set, place, levels->across, on_cpu.get());
  return std::make_unique<Hierarchy>(std::move(*levels), std::move(on_cpu), std::move(staged));
}

std::unique_ptr<Communicator> NcclBackend::connect(ProcessSetId set, const Place& place,
                                                   std::span<const int> members,
                                                   Communicator* on_cpu) {
  return std::make_unique<NcclCommunicator>(resources_, set, members, *on_cpu,
                                            staged_.connect(set, place, members, on_cpu),
                                            hierarchy_of(set, place, members));
}

}  // namespace polyhvd::nccl
