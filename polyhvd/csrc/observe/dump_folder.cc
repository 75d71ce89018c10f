#include "observe/dump_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace polyhvd {
namespace {

constexpr int kFolderFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
constexpr mode_t kFolderMode = 0700;
constexpr mode_t kFileMode = 0600;
constexpr int kTries = 8;  // of unpredictable names
constexpr std::string_view kFilePrefix = "polyhvd-flight.";
// Entries that one sweep checks and removes; the next one continues.
constexpr int kEntriesMax = 4096;
constexpr std::size_t kRemovedMax = 64;

using Directory = std::unique_ptr<DIR, int (*)(DIR*)>;

std::string random_word() {
  constexpr unsigned kNonBlocking = 1;  // GRND_NONBLOCK
  std::uint64_t number = 0;
  // getrandom() without the C library's function, which came with glibc 2.25.
  if (syscall(SYS_getrandom, &number, sizeof number, kNonBlocking) != sizeof number) {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    number = static_cast<std::uint64_t>(now.tv_nsec) * 2654435761u ^
             static_cast<std::uint64_t>(getpid());
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

bool is_private(int fd) {
  struct stat status{};
  return fstat(fd, &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == geteuid() &&
         (status.st_mode & 077) == 0;
}

bool anyone_may_write(int fd) {
  struct stat status{};
  return fstat(fd, &status) != 0 || (status.st_mode & S_IWOTH) != 0;
}

// The folder `name`, made or found; not open unless it belongs only to this user.
OwnedFd open_private(int parent, const std::string& name, bool& made) {
  made = mkdirat(parent, name.c_str(), kFolderMode) == 0;
  if (!made && errno != EEXIST) return OwnedFd();
  OwnedFd fd(openat(parent, name.c_str(), kFolderFlags | O_NOFOLLOW));
  if (!fd) return fd;
  // A default access list of the parent may have added to the mode.
  if (made && fchmod(fd.get(), kFolderMode) != 0) return OwnedFd();
  if (is_private(fd.get())) return fd;
  errno = EPERM;
  return OwnedFd();
}

// As above; where that is impossible, with an unpredictable suffix.
OwnedFd open_private_somehow(int parent, std::string& name, bool& made) {
  OwnedFd fd = open_private(parent, name, made);
  for (int i = 0; i < kTries && !fd && (errno == EPERM || errno == ENOTDIR || errno == ELOOP);
       ++i) {
    std::string other = name + "-" + random_word();
    fd = open_private(parent, other, made);
    if (fd) name = std::move(other);
  }
  return fd;
}

bool write_all(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;
    if (n <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

// Every file is new: an existing file of that name is never opened.
bool write_new(int folder, const std::string& name, std::string_view text) noexcept {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  const int fd = openat(folder, name.c_str(), kFlags, kFileMode);
  if (fd < 0) return false;
  int why = write_all(fd, text) ? 0 : errno;
  if (close(fd) != 0 && why == 0) why = errno;
  if (why == 0) return true;
  unlinkat(folder, name.c_str(), 0);
  errno = why;
  return false;
}

// Whether `name` is free, or this user's own file.
bool may_replace(int folder, const std::string& name) noexcept {
  struct stat status{};
  if (fstatat(folder, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return errno == ENOENT;
  return S_ISREG(status.st_mode) && status.st_uid == geteuid();
}

// Of "polyhvd-flight.rank3.812.json" 812.
std::optional<pid_t> pid_in(std::string_view name) {
  const std::size_t dot = name.find('.', kFilePrefix.size());
  if (dot == std::string_view::npos) return std::nullopt;
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(name.data() + dot + 1, name.data() + name.size(), pid);
  if (error != std::errc() || pid <= 0) return std::nullopt;
  return pid;
}

std::vector<std::string> entries_of(int folder) {
  std::vector<std::string> names;
  const int fd = openat(folder, ".", kFolderFlags);
  if (fd < 0) return names;
  const Directory directory(fdopendir(fd), &closedir);
  if (!directory) {
    close(fd);
    return names;
  }
  for (int i = 0; i < kEntriesMax; ++i) {
    const dirent* entry = readdir(directory.get());
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  return names;
}

// Nothing but our files is removed, and nothing while a process that has written one lives.
void remove_job(int parent, const std::string& name) {
  const OwnedFd folder(openat(parent, name.c_str(), kFolderFlags | O_NOFOLLOW));
  if (!folder) return;
  std::vector<std::string> files = entries_of(folder.get());
  std::erase_if(files, [](const std::string& file) { return !file.starts_with(kFilePrefix); });
  const auto is_alive = [](const std::string& file) {
    const auto pid = pid_in(file);
    return pid && (kill(*pid, 0) == 0 || errno != ESRCH);
  };
  if (std::ranges::any_of(files, is_alive)) return;
  for (const std::string& file : files) unlinkat(folder.get(), file.c_str(), 0);
  unlinkat(parent, name.c_str(), AT_REMOVEDIR);
}

}  // namespace

OwnedFd::~OwnedFd() {
  if (fd_ >= 0) close(fd_);
}

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

DumpFolder::DumpFolder(const DumpPlace& place) : path_(place.root) {
  OwnedFd root(open(place.root.c_str(), kFolderFlags));
  if (!root) return;
  if (place.job.empty() && !anyone_may_write(root.get())) {
    fd_ = std::move(root);
    return;
  }
  std::string user = "polyhvd-flight-" + std::to_string(geteuid());
  bool made = false;
  parent_ = open_private_somehow(root.get(), user, made);
  if (!parent_) return;
  path_ += "/" + user;
  own_name_ = place.job.empty() ? "files" : place.job;
  fd_ = open_private_somehow(parent_.get(), own_name_, is_new_);
  path_ += "/" + own_name_;
}

std::string DumpFolder::write(std::string_view name, std::string_view text) const {
  std::string taken(name);
  const std::string draft = taken + "." + random_word() + ".new";
  if (!write_new(fd_.get(), draft, text)) return "";
  if (!may_replace(fd_.get(), taken)) {
    taken.resize(taken.size() - std::string_view(".json").size());
    taken += "." + random_word() + ".json";
  }
  if (renameat(fd_.get(), draft.c_str(), fd_.get(), taken.c_str()) == 0) return path_ + "/" + taken;
  const int why = errno;
  unlinkat(fd_.get(), draft.c_str(), 0);
  errno = why;
  return "";
}

void DumpFolder::sweep() const noexcept try {
  if (!parent_) return;
  std::vector<std::pair<time_t, std::string>> jobs;
  for (std::string& name : entries_of(parent_.get())) {
    struct stat status{};
    if (name == own_name_) continue;
    if (fstatat(parent_.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISDIR(status.st_mode)) jobs.emplace_back(status.st_mtime, std::move(name));
  }
  std::ranges::sort(jobs, std::greater<>());
  const time_t oldest = time(nullptr) - std::chrono::seconds(kKept).count();
  std::vector<std::string> over;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (i + 1 >= kJobsKept || jobs[i].first < oldest) over.push_back(std::move(jobs[i].second));
  }
  std::ranges::reverse(over);
  if (over.size() > kRemovedMax) over.resize(kRemovedMax);
  for (const std::string& name : over) remove_job(parent_.get(), name);
} catch (const std::exception&) {
  // No memory: the next job sweeps.
}

}  // namespace polyhvd
