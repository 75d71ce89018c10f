#include "nccl/nccl_backend.h"

#include "nccl/nccl_communicator.h"

namespace polyhvd::nccl {

std::shared_ptr<const Library> Fabric::library() {
  if (!library_) library_ = open_library(settings.libraries);
  return library_;
}

std::shared_ptr<cuda::OwnStream> Fabric::stream(const cuda::ContextPtr& context) {
  if (!stream_) stream_ = std::make_shared<cuda::OwnStream>(context, true);
  return stream_;
}

void Fabric::warn(const std::string& text) {
  if (!std::exchange(warned_, true)) log(text);
}

std::unique_ptr<Communicator> NcclBackend::connect(ProcessSetId set, std::span<const int> members,
                                                   Communicator* on_cpu) {
  return std::make_unique<NcclCommunicator>(fabric_, set, members, *on_cpu,
                                            staged_.connect(set, members, on_cpu));
}

}  // namespace polyhvd::nccl
