// The file of a timeline: formats events, and keeps within its size. One thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "observe/timeline.h"

namespace polyhvd {

class TimelineWriter {
 public:
  TimelineWriter(int rank, TimelineOptions options);
  ~TimelineWriter();
  TimelineWriter(const TimelineWriter&) = delete;
  TimelineWriter& operator=(const TimelineWriter&) = delete;

  const std::string& path() const noexcept { return options_.path; }
  bool marks_cycles() const noexcept { return options_.mark_cycles; }

  // False with errno when the file cannot be made. An old half is removed.
  bool open();
  void write_operation(const Record& record, const Transfer& transfer, const TickScale& scale);
  void write_cycle(std::int64_t ns);
  void write_data_wait(std::int64_t begin_ns, std::int64_t end_ns);
  // What follows is of another world, described by `header`.
  void begin_world(std::string header, std::int64_t ns);
  void note_dropped(std::uint64_t events) noexcept { dropped_ += events; }
  // Hands everything formatted to the kernel: what is lost when the process is killed
  // came after the last flush. When the disk is full, the rest is dropped.
  void flush() noexcept;
  // The errno that ended the file early, once; 0 when there is none.
  int take_problem() noexcept { return std::exchange(problem_, 0); }
  // Makes the file whole. Idempotent.
  void close() noexcept;

 private:
  // One for each tensor: spans of a row never cross.
  struct Row {
    std::uint32_t id = 0;
    std::int64_t end_ns = 0;  // of what was written last
  };

  enum Span : std::size_t { kNegotiate, kWait, kQueue, kOperation, kTransport, kSpans };

  static std::string name_of_span(OpKind kind, Span span);
  bool open_file(int flags);
  void rotate();
  void keep_within_limits();
  Row& row_of(const Record& record, std::int64_t begin_ns);
  Row& row_of(const Record& record, std::string_view name);
  void write_header();
  void begin_event(std::string_view phase, std::string_view name, std::uint32_t row);
  void begin_span(OpKind kind, Span span, std::uint32_t row, std::int64_t begin, std::int64_t end);
  void end_event();
  void write_metadata(std::string_view name, std::uint32_t row, std::string_view value);

  const int rank_;
  TimelineOptions options_;
  const std::string old_path_;
  int fd_ = -1;
  int problem_ = 0;
  std::string text_;              // not yet written
  std::uint64_t bytes_ = 0;       // of this file, but for `text_`
  std::uint64_t events_ = 0;      // in this file
  std::uint64_t old_events_ = 0;  // in the old half
  std::uint64_t dropped_ = 0;
  std::unordered_map<std::string, Row> rows_;  // of this file, by what row_key() makes
  std::string row_key_;                        // scratch
  // How a span's event begins, up to the number of its row; made at its first use.
  std::array<std::array<std::string, kSpans>, kOpKindCount> openings_;
};

}  // namespace polyhvd
