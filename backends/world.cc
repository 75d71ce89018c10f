#include "world.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include "engine/process_state.h"
#include "gpu/devices.h"
#include "gpu/staged_backend.h"
#include "host/host_backend.h"
#include "mpi/mpi_backend.h"
#include "nccl/nccl_backend.h"
#include "observe/lock_order.h"
#include "shm/death_watch.h"
#include "shm/local_peers.h"
#include "shm/segment.h"
#include "shm/shm_channel.h"
#include "tcp/tcp_channel.h"
#include "tcp/tcp_transport.h"

namespace polyhvd {
namespace {

constexpr int kTreeRadix = 4;

// "nccl" of "nccl:allreduce+broadcast".
std::string base_of(const std::string& name) { return name.substr(0, name.find(':')); }
bool is_nccl(const std::string& name) {
  return base_of(name) == "nccl" || base_of(name) == "nccl?";
}

// A backend for some kinds of operations.
class Restricted final : public Backend {
 public:
  Restricted(std::unique_ptr<Backend> backend, std::vector<std::string> kinds)
      : backend_(std::move(backend)), kinds_(std::move(kinds)) {}
  std::string_view name() const noexcept override { return backend_->name(); }
  bool supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const override {
    return std::ranges::count(kinds_, name_of(kind)) > 0 &&
           backend_->supports(kind, dtype, op, device);
  }
  std::unique_ptr<Communicator> connect(ProcessSetId set, const Place& place,
                                        std::span<const int> members,
                                        Communicator* on_cpu) override {
    return backend_->connect(set, place, members, on_cpu);
  }
  void tune(const Tuning& tuning) override { backend_->tune(tuning); }

 private:
  std::unique_ptr<Backend> backend_;
  std::vector<std::string> kinds_;
};

// Closes the descriptors that no part of the engine has taken over, because one could not be made.
class Unclaimed {
 public:
  explicit Unclaimed(const Connections& connections) : connections_(connections) {}
  ~Unclaimed() {
    for (const auto* fds :
         {&connections_.local_fds, &connections_.control_fds, &connections_.data_fds}) {
      for (const auto& [rank, fd] : *fds) ::close(fd);
    }
    if (connections_.segment_fd >= 0) ::close(connections_.segment_fd);
  }
  Unclaimed(const Unclaimed&) = delete;
  Unclaimed& operator=(const Unclaimed&) = delete;

 private:
  const Connections& connections_;
};

// Owns the connections of one rank, and what its communicators share.
class ConnectedRank final : public Liveness {
 public:
  ConnectedRank(Connections connections, Parking& parking, bool data_checksums);
  ~ConnectedRank() override { close(); }

  std::unique_ptr<Channel> connect_parent();
  std::vector<Child> connect_children();
  host::Resources& resources() noexcept { return resources_; }
  std::unique_ptr<Backend> make_backend(const std::string& name);
  // Before the backends are made: of tensors on GPUs, `staged` does what NCCL does not, and
  // `between_hosts` moves bytes of CPUs where NCCL serves only within hosts.
  void prepare_nccl(Backend& staged, Backend& between_hosts, const EngineOptions& options);
  std::unique_ptr<Backend> make_staged_backend(const Backend& on_cpu) {
    return std::make_unique<gpu::StagedBackend>(connections_.rank, staging_, on_cpu);
  }
  std::shared_ptr<Devices> devices() const { return devices_; }

  std::optional<Error> abort_reason() const override;
  std::vector<int> dead_here() const override;
  void spread_abort(const Error& error) noexcept override;
  void leave() noexcept override;
  void move_along(bool pending) override {
    if (mpi_) mpi_->move_along(pending);
  }
  void tell_removals(std::uint64_t count) noexcept override;
  void close() noexcept override;
  std::vector<int> descriptors() const override { return descriptors_; }
  std::string name_of(int rank) const override {
    return connections_.labels.at(static_cast<std::size_t>(rank));
  }
  std::optional<ProcessState> look_at(int rank) const override {
    return local_ == 0 ? look_beside(rank) : std::nullopt;
  }
  std::optional<ProcessState> look_beside(int rank) const override;
  void add_counters(std::map<std::string, std::uint64_t>& counters) const override;

 private:
  const std::vector<int>& here() const {
    return connections_.domains[static_cast<std::size_t>(domain_)];
  }
  int rank_on_host() const;
  std::unique_ptr<Channel> connect_leader(int rank);
  int leader_of(int domain) const {
    return connections_.domains[static_cast<std::size_t>(domain)][0];
  }
  std::vector<int> subtree_of(int domain) const;
  std::vector<shm::LocalPeer> local_peers() const;
  std::vector<int> ranks_of(std::vector<int> locals) const {
    for (int& item : locals) item = here()[static_cast<std::size_t>(item)];
    return locals;
  }
  std::string described(int rank) const {
    return "rank " + std::to_string(rank) + " (" + name_of(rank) + ")";
  }
  [[noreturn]] void on_lost(int rank) const;
  Error error_of_loss(int rank) const;

  Connections connections_;  // what has been taken over is removed from it
  Unclaimed unclaimed_{connections_};
  Parking& parking_;
  int domain_ = 0;
  int local_ = 0;
  std::unique_ptr<shm::Segment> segment_;
  std::unique_ptr<shm::LocalPeers> peers_;
  std::unique_ptr<shm::DeathWatch> death_watch_;  // reset under transport_mutex_, as transport_ is
  std::vector<int> dead_here_;                    // at its end; guarded by that mutex
  std::vector<int> descriptors_;
  host::Resources resources_;
  std::shared_ptr<gpu::Devices> devices_;
  std::shared_ptr<gpu::Staging> staging_;
  std::unique_ptr<mpi::Resources> mpi_;                        // null unless MPI moves data
  std::unique_ptr<nccl::Resources> nccl_;                      // null unless NCCL may; never reset
  Backend* staged_ = nullptr;                                  // the engine's
  Backend* between_hosts_ = nullptr;                           // likewise
  mutable OrderedMutex<LockRank::transport> transport_mutex_;  // for whoever asks while it closes
  std::unique_ptr<tcp::TcpTransport> transport_;               // reset under transport_mutex_
};

ConnectedRank::ConnectedRank(Connections connections, Parking& parking, bool data_checksums)
    : connections_(std::move(connections)), parking_(parking) {
  resources_.rank = connections_.rank;
  resources_.domains = connections_.domains;
  resources_.pids = connections_.pids;
  resources_.domain_of.resize(static_cast<std::size_t>(connections_.size));
  for (std::size_t d = 0; d < connections_.domains.size(); ++d) {
    for (std::size_t i = 0; i < connections_.domains[d].size(); ++i) {
      const int rank = connections_.domains[d][i];
      resources_.domain_of.at(static_cast<std::size_t>(rank)) = static_cast<int>(d);
      if (rank != connections_.rank) continue;
      domain_ = static_cast<int>(d);
      local_ = static_cast<int>(i);
    }
  }
  for (const auto* fds :
       {&connections_.local_fds, &connections_.control_fds, &connections_.data_fds}) {
    for (const auto& [rank, fd] : *fds) descriptors_.push_back(fd);
  }
  const auto lost = [this](int rank) { on_lost(rank); };
  if (here().size() > 1) {
    segment_ =
        std::make_unique<shm::Segment>(connections_.segment_fd, static_cast<int>(here().size()));
    ::close(std::exchange(connections_.segment_fd, -1));
    parking_.set_sleep_flag(&segment_->sleep_flag(local_));
    std::vector<shm::LocalPeer> peers = local_peers();
    connections_.local_fds.clear();
    peers_ = std::make_unique<shm::LocalPeers>(*segment_, parking_, std::move(peers), local_, lost);
    if (connections_.watches_deaths) {
      const auto wake = [this] { parking_.wake(); };
      death_watch_ = std::make_unique<shm::DeathWatch>(*segment_, local_, wake);
    }
  }
  if (connections_.domains.size() > 1) {
    const auto name = [this](int rank) { return described(rank); };
    const auto data_fds = std::exchange(connections_.data_fds, {});
    transport_ = std::make_unique<tcp::TcpTransport>(
        data_fds, connections_.data_keys, parking_,
        tcp::TcpTransport::Options{connections_.rank, data_checksums, name, lost});
  }
  resources_.segment = segment_.get();
  resources_.peers = peers_.get();
  resources_.transport = transport_.get();
  resources_.parking = &parking_;
  devices_ = std::make_shared<gpu::Devices>(std::make_shared<gpu::Driver>(connections_.rank),
                                            rank_on_host());
  staging_ = std::make_shared<gpu::Staging>(devices_, parking_);
}

// Also where ranks of a host share no memory.
int ConnectedRank::rank_on_host() const {
  int lower = 0;
  for (std::size_t rank = 0; rank < connections_.pids.size(); ++rank) {
    if (static_cast<int>(rank) < connections_.rank && connections_.pids[rank] > 0) ++lower;
  }
  return std::max(lower, local_);
}

// One that has failed closes its connections, too: why is what counts.
void ConnectedRank::on_lost(int rank) const {
  throw Failure(abort_reason().value_or(error_of_loss(rank)));
}

Error ConnectedRank::error_of_loss(int rank) const {
  return {ErrorCode::kPeerLost, described(rank) + " was lost to rank " +
                                    std::to_string(connections_.rank) +
                                    ": it ended or was cut off without shutdown()"};
}

std::optional<Error> ConnectedRank::abort_reason() const {
  if (!segment_) return std::nullopt;
  if (auto reason = segment_->abort_reason()) return reason;
  const int dead = death_watch_ ? death_watch_->found() : -1;
  if (dead < 0) return std::nullopt;
  return error_of_loss(here()[static_cast<std::size_t>(dead)]);
}

std::vector<int> ConnectedRank::dead_here() const {
  std::lock_guard lock(transport_mutex_);
  return death_watch_ ? ranks_of(death_watch_->dead()) : dead_here_;
}

std::vector<shm::LocalPeer> ConnectedRank::local_peers() const {
  std::vector<shm::LocalPeer> peers;
  for (std::size_t i = 0; i < here().size(); ++i) {
    const int rank = here()[i];
    const int fd = rank == connections_.rank ? -1 : connections_.local_fds.at(rank);
    peers.push_back({static_cast<int>(i), rank, fd});
  }
  return peers;
}

std::vector<int> ConnectedRank::subtree_of(int domain) const {
  std::vector<int> ranks = connections_.domains[static_cast<std::size_t>(domain)];
  for (int d = domain + 1; d < static_cast<int>(connections_.domains.size()); ++d) {
    if (tree_parent(d) != domain) continue;
    const std::vector<int> below = subtree_of(d);
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  std::ranges::sort(ranks);
  return ranks;
}

std::unique_ptr<Channel> ConnectedRank::connect_parent() {
  if (local_ != 0) {
    return std::make_unique<shm::ShmChannel>(segment_->ring_to_leader(local_),
                                             segment_->ring_from_leader(local_), *peers_, 0,
                                             here()[0]);
  }
  if (domain_ == 0) return nullptr;
  const int leader = leader_of(tree_parent(domain_));
  return connect_leader(leader);
}

std::unique_ptr<Channel> ConnectedRank::connect_leader(int rank) {
  const SessionKeys& keys = connections_.control_keys.at(rank);
  const int fd = connections_.control_fds.at(rank);
  connections_.control_fds.erase(rank);
  return std::make_unique<tcp::TcpChannel>(
      fd, keys, tcp::TcpChannel::Ends{connections_.rank, rank, described(rank)}, parking_);
}

std::vector<Child> ConnectedRank::connect_children() {
  std::vector<Child> children;
  if (local_ != 0) return children;
  for (int local = 1; local < static_cast<int>(here().size()); ++local) {
    const int rank = here()[static_cast<std::size_t>(local)];
    children.push_back(
        {std::make_unique<shm::ShmChannel>(segment_->ring_from_leader(local),
                                           segment_->ring_to_leader(local), *peers_, local, rank),
         {rank}});
  }
  for (int d = 1; d < static_cast<int>(connections_.domains.size()); ++d) {
    if (tree_parent(d) != domain_) continue;
    const int leader = leader_of(d);
    children.push_back({connect_leader(leader), subtree_of(d)});
  }
  return children;
}

std::unique_ptr<Backend> ConnectedRank::make_backend(const std::string& name) {
  if (const std::size_t colon = name.find(':'); colon != std::string::npos) {
    std::vector<std::string> kinds;
    std::istringstream listed(name.substr(colon + 1));
    for (std::string kind; std::getline(listed, kind, '+');) kinds.push_back(kind);
    return std::make_unique<Restricted>(make_backend(name.substr(0, colon)), std::move(kinds));
  }
  if (name == "host") return std::make_unique<host::HostBackend>(resources_);
  if (is_nccl(name)) {
    return std::make_unique<nccl::NcclBackend>(*nccl_, *staged_, *between_hosts_);
  }
  if (name != "mpi" || !connections_.mpi) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "there is no backend '" + name + "' in this job; see POLYHVD_BACKENDS");
  }
  if (!mpi_) mpi_ = std::make_unique<mpi::Resources>(connections_.mpi, resources_);
  return std::make_unique<mpi::MpiBackend>(*mpi_);
}

void ConnectedRank::prepare_nccl(Backend& staged, Backend& between_hosts,
                                 const EngineOptions& options) {
  const auto is_required = [](const std::string& name) { return base_of(name) == "nccl"; };
  nccl::Settings settings{.libraries = connections_.nccl_libraries,
                          .required = std::ranges::any_of(connections_.backends, is_required),
                          .shares_gpus = connections_.shares_gpus,
                          .reproducible = options.reproducible,
                          .hierarchical = connections_.hierarchical};
  const auto label = [this](int rank) { return name_of(rank); };
  const auto host = [this](int rank) {
    return resources_.domain_of.at(static_cast<std::size_t>(rank));
  };
  nccl_ = std::make_unique<nccl::Resources>(connections_.rank, std::move(settings), devices_,
                                            parking_, label, host, options.log);
  staged_ = &staged;
  between_hosts_ = &between_hosts;
}

void ConnectedRank::spread_abort(const Error& error) noexcept {
  // MPI would wait for ranks that do not come any more.
  if (connections_.mpi) connections_.mpi->runtime().give_up();
  if (segment_) {
    segment_->set_abort(error);
    peers_->wake_all();
  }
  if (transport_) transport_->say_failure(error);
}

void ConnectedRank::leave() noexcept {
  if (segment_) segment_->departed_flag(local_).store(1);
  if (transport_) transport_->say_goodbye();
}

void ConnectedRank::tell_removals(std::uint64_t count) noexcept {
  if (!segment_) return;
  segment_->removals(local_).store(count);
  for (int m = 0; m < static_cast<int>(here().size()); ++m) {
    if (m != local_) peers_->wake(m, Parking::kWaiting);
  }
}

void ConnectedRank::close() noexcept {
  parking_.set_sleep_flag(nullptr);
  std::lock_guard lock(transport_mutex_);
  if (death_watch_) dead_here_ = ranks_of(death_watch_->dead());
  death_watch_.reset();
  peers_.reset();
  segment_.reset();
  transport_.reset();
  mpi_.reset();
  connections_.mpi.reset();
}

std::optional<ProcessState> ConnectedRank::look_beside(int rank) const {
  const auto index = static_cast<std::size_t>(rank);
  const bool may_look = index < connections_.pids.size() && connections_.pids[index] > 0;
  if (!may_look || rank == connections_.rank) return std::nullopt;
  return process_state(connections_.pids[index]);
}

void ConnectedRank::add_counters(std::map<std::string, std::uint64_t>& counters) const {
  counters["staged_bytes"] = staging_->bytes();
  counters["nccl_bytes"] = nccl_ ? nccl_->bytes() : 0;
  counters["shm_bytes"] = resources_.shm_bytes.load(std::memory_order_relaxed);
  counters["cma_bytes"] = resources_.cma_bytes.load(std::memory_order_relaxed);
  counters["deaths_marked"] = dead_here().size();
  std::lock_guard lock(transport_mutex_);
  counters["tcp_bytes_sent"] = transport_ ? transport_->bytes_sent() : 0;
  counters["tcp_bytes_received"] = transport_ ? transport_->bytes_received() : 0;
  counters["tcp_bytes_checked"] = transport_ ? transport_->bytes_checked() : 0;
  counters["mpi_bytes"] = mpi_ ? mpi_->bytes() : 0;
}

bool is_crowded(const Connections& connections) {
  const auto cores = static_cast<std::size_t>(std::thread::hardware_concurrency());
  for (const auto& domain : connections.domains) {
    if (std::ranges::count(domain, connections.rank) > 0) return domain.size() > cores;
  }
  return false;
}

}  // namespace

int tree_parent(int domain) noexcept { return domain == 0 ? -1 : (domain - 1) / kTreeRadix; }

std::unique_ptr<Engine> make_engine(Connections connections, EngineOptions options) {
  options.crowded = options.crowded || is_crowded(connections);
  const int rank = connections.rank;
  const int size = connections.size;
  const std::vector<std::vector<int>> process_sets = connections.process_sets;
  const std::vector<std::string> backends = connections.backends;
  auto parking = std::make_unique<Parking>();
  auto connected =
      std::make_unique<ConnectedRank>(std::move(connections), *parking, options.data_checksums);
  if (process_sets.size() >= kProcessSetsMax) {
    throw Failure(ErrorCode::kInvalidArgument, "at most " + std::to_string(kProcessSetsMax - 1) +
                                                   " process sets are supported; " +
                                                   std::to_string(process_sets.size()) +
                                                   " were passed");
  }
  ProcessSets sets(size);
  for (const std::vector<int>& ranks : process_sets) sets.add(ranks);
  host::Resources& resources = connected->resources();
  resources.reproducible = options.reproducible;
  resources.attaching = static_cast<host::Attaching>(options.attaching);
  EngineParts parts;
  parts.parent = connected->connect_parent();
  parts.children = connected->connect_children();
  for (const std::string& name : backends) {
    if (is_nccl(name)) continue;
    if (name == "host") parts.on_cpu = parts.backends.size();
    parts.backends.push_back(connected->make_backend(name));
  }
  auto staged = connected->make_staged_backend(*parts.backends[parts.on_cpu]);
  const auto reduces_on_cpus = [](const auto& backend) {
    return backend->supports(OpKind::kAllreduce, DType::kFloat32, ReduceOp::kSum, DeviceKind::kCpu);
  };
  connected->prepare_nccl(*staged, **std::ranges::find_if(parts.backends, reduces_on_cpus),
                          options);
  // Operations on CPUs ask the backends in order, and these are never theirs.
  for (const std::string& name : backends) {
    if (is_nccl(name)) parts.backends.push_back(connected->make_backend(name));
  }
  parts.backends.push_back(std::move(staged));
  parts.devices = connected->devices();
  parts.liveness = std::move(connected);
  return std::make_unique<Engine>(rank, std::move(sets), std::move(parking), std::move(parts),
                                  std::move(options), resources.overlap);
}

}  // namespace polyhvd
