// Where flight dumps are written, safe from other users of this machine: in
// folders that only this user may enter, each file newly created, no symbolic link followed and
// nothing waited for. Refuses what others could have prepared.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

namespace polyhvd {

// A file descriptor that is closed at the end.
class OwnedFd {
 public:
  explicit OwnedFd(int fd = -1) noexcept : fd_(fd) {}
  ~OwnedFd();
  OwnedFd(OwnedFd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  OwnedFd& operator=(OwnedFd&& other) noexcept;
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_;
};

struct DumpPlace {
  std::string root;  // must exist; empty: nothing is written
  // The job's name. Empty: files lie in `root` itself, unless anyone may write there.
  std::string job;
};

class DumpFolder {
 public:
  static constexpr std::size_t kJobsKept = 32;
  static constexpr std::chrono::hours kKept{7 * 24};

  // Opens the folder of `place`, and makes it where it is missing: in a folder
  // "polyhvd-flight-<uid>" of the root, of mode 0700, one for each job. Where something
  // else has that name, one with an unpredictable name. Not open on failure: see errno.
  explicit DumpFolder(const DumpPlace& place);

  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }

  // Writes `text` to `name`, over this user's earlier one: whole or not at all. Where `name`
  // is taken by something else, `name` gets another ending before ".json". The path; empty
  // on failure, see errno.
  std::string write(std::string_view name, std::string_view text) const;

  // Removes folders of jobs that have ended, the oldest first: all but kJobsKept of them, and those
  // older than kKept. Some of them, if they are many.
  void sweep() const noexcept;

  // Whether the constructor has made it.
  bool is_new() const noexcept { return is_new_; }

 private:
  std::string path_;
  std::string own_name_;  // within the user's folder; empty where there is none
  OwnedFd parent_;        // the user's folder, of all jobs
  OwnedFd fd_;
  bool is_new_ = false;
};

}  // namespace polyhvd
