#include "observe/timeline_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "observe/json.h"

namespace polyhvd {
namespace {

constexpr std::size_t kFlushBytes = std::size_t{1} << 20;
constexpr std::uint32_t kCycleRow = 0;
constexpr std::string_view kDataRow = "data";  // no key of an operation's row begins so
// Programs that make names up would fill memory with rows: beyond this, one for all.
constexpr std::size_t kRowsMax = 1 << 14;

// "trace.json" and "old" make "trace.old.json".
std::string with_infix(const std::string& path, std::string_view infix) {
  const std::size_t slash = path.rfind('/');
  std::size_t dot = path.rfind('.');
  const std::size_t first = slash == std::string::npos ? 0 : slash + 1;
  if (dot == std::string::npos || dot <= first) dot = path.size();
  return path.substr(0, dot) + "." + std::string(infix) + path.substr(dot);
}

std::string upper(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return out;
}

// Microseconds, as the format wants them, with all digits.
void append_us(std::string& out, std::int64_t ns) {
  json::append_number(out, ns / 1000);
  const auto rest = static_cast<int>(ns % 1000);
  const char digits[] = {'.', static_cast<char>('0' + rest / 100),
                         static_cast<char>('0' + rest / 10 % 10),
                         static_cast<char>('0' + rest % 10)};
  out.append(digits, sizeof digits);
}

// "{"ph":"X","name":"WAIT","pid":0,"tid":"
std::string opening_of(int rank, std::string_view name) {
  std::string out = "{\"ph\":\"X\"";
  json::append_field(out, "name", name);
  json::append_field(out, "pid", rank);
  json::append_key(out, "tid");
  return out;
}

// Of a row: "allreduce.conv1.weight".
std::string title_of(const Record& record, std::string_view name) {
  const auto prefix = std::string(name_of(record.kind)) + ".";
  // "allreduce.noname.0" has its kind already.
  std::string title = name.starts_with(prefix) ? "" : prefix;
  title += name;
  if (record.process_set != kWorld) {
    title += " (process set " + std::to_string(record.process_set) + ")";
  }
  return title;
}

// Rows for calls without names that are in flight together, of one kind and process set.
constexpr std::uint64_t kUnnamedRows = 64;

// "allreduce.noname." of the name of a call without one, and else nothing.
std::string_view stem_of_unnamed(const Record& record) {
  const std::string_view name = record.name.view();
  const std::string_view kind = name_of(record.kind);
  const std::size_t size = kind.size() + std::string_view(".noname.").size();
  if (!name.starts_with(kind) || !name.substr(kind.size()).starts_with(".noname.")) return {};
  const bool is_number =
      std::ranges::all_of(name.substr(size), [](unsigned char c) { return std::isdigit(c) != 0; });
  return is_number && name.size() > size ? name.substr(0, size) : std::string_view();
}

}  // namespace

TimelineWriter::TimelineWriter(int rank, TimelineOptions options)
    : rank_(rank), options_(std::move(options)), old_path_(with_infix(options_.path, "old")) {}

TimelineWriter::~TimelineWriter() { close(); }

// The file ----------------------------------------------------------------------

bool TimelineWriter::open() {
  if (!open_file(O_TRUNC)) return false;
  unlink(old_path_.c_str());
  return true;
}

// A pipe without a reader is an error, and one whose reader sleeps ends the file: nothing is
// waited for.
bool TimelineWriter::open_file(int flags) {
  fd_ = ::open(path().c_str(), O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC | flags, 0644);
  if (fd_ < 0) return false;
  rows_.clear();
  bytes_ = events_ = 0;
  text_ = "[\n";
  write_metadata("process_name", kCycleRow, "rank " + std::to_string(rank_));
  write_header();
  flush();
  return true;
}

void TimelineWriter::write_header() {
  begin_event("M", "polyhvd", kCycleRow);
  text_.append(",\"args\":{\"header\":").append(options_.header);
  json::append_field(text_, "events_dropped", dropped_);
  text_ += '}';
  end_event();
}

void TimelineWriter::rotate() {
  close();
  dropped_ += old_events_;
  old_events_ = events_;
  const bool kept = std::rename(path().c_str(), old_path_.c_str()) == 0;
  if (!kept) dropped_ += std::exchange(old_events_, 0);
  // Its name has just become free: what is there now belongs to another process.
  if (!open_file(kept ? O_EXCL | O_NOFOLLOW : O_TRUNC)) problem_ = errno;
}

// Before an event: the newest ones are always in the newest file.
void TimelineWriter::keep_within_limits() {
  if (fd_ < 0) return;
  if (bytes_ + text_.size() > options_.bytes_max / 2) {
    rotate();
  } else if (text_.size() > kFlushBytes) {
    flush();
  }
}

void TimelineWriter::flush() noexcept {
  std::string_view rest = text_;
  bytes_ += rest.size();
  while (fd_ >= 0 && !rest.empty()) {
    const ssize_t n = ::write(fd_, rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      problem_ = errno;
      ::close(std::exchange(fd_, -1));
    } else {
      rest.remove_prefix(static_cast<std::size_t>(n));
    }
  }
  text_.clear();
}

void TimelineWriter::close() noexcept try {
  if (fd_ < 0) return;
  begin_event("M", "polyhvd_end", kCycleRow);
  json::append_field(text_.append(",\"args\":{\"complete\":true"), "events_dropped", dropped_);
  text_ += "}}\n]\n";
  flush();
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
} catch (const std::exception&) {
  // No memory: the file has no end, which readers accept.
}

// Events ------------------------------------------------------------------------

std::string TimelineWriter::name_of_span(OpKind kind, Span span) {
  switch (span) {
    case kNegotiate:
      return "NEGOTIATE_" + upper(name_of(kind));
    case kWait:
      return "WAIT";
    case kQueue:
      return "QUEUE";
    case kTransport:
      return "TRANSPORT";
    case kOperation:
    case kSpans:
      break;
  }
  return upper(name_of(kind));
}

void TimelineWriter::begin_event(std::string_view phase, std::string_view name, std::uint32_t row) {
  text_.append("{\"ph\":\"").append(phase).append("\"");
  json::append_field(text_, "name", name);
  json::append_field(text_, "pid", rank_);
  json::append_field(text_, "tid", row);
}

void TimelineWriter::end_event() { text_ += "},\n"; }

void TimelineWriter::write_metadata(std::string_view name, std::uint32_t row,
                                    std::string_view value) {
  begin_event("M", name, row);
  json::append_string(text_.append(",\"args\":{\"name\":"), value);
  text_ += '}';
  end_event();
}

// What a caller adds to the event follows; then end_event().
void TimelineWriter::begin_span(OpKind kind, Span span, std::uint32_t row, std::int64_t begin,
                                std::int64_t end) {
  std::string& opening = openings_[static_cast<std::size_t>(kind)][span];
  if (opening.empty()) opening = opening_of(rank_, name_of_span(kind, span));
  json::append_number(text_.append(opening), row);
  append_us(text_.append(",\"ts\":"), begin);
  append_us(text_.append(",\"dur\":"), std::max<std::int64_t>(end - begin, 0));
  ++events_;
}

// Calls without names share as few rows as there were in flight together.
TimelineWriter::Row& TimelineWriter::row_of(const Record& record, std::int64_t begin_ns) {
  const std::string_view stem = stem_of_unnamed(record);
  if (stem.empty()) return row_of(record, record.name.view());
  for (std::uint64_t number = 0;; ++number) {
    Row& row = row_of(record, std::string(stem) + std::to_string(number));
    if (row.end_ns <= begin_ns || number + 1 == kUnnamedRows) return row;
  }
}

TimelineWriter::Row& TimelineWriter::row_of(const Record& record, std::string_view name) {
  row_key_.clear();
  if (rows_.size() < kRowsMax) {
    row_key_ += static_cast<char>('0' + static_cast<int>(record.kind));
    json::append_number(row_key_, record.process_set);
    row_key_.append(1, ' ').append(name);
  }
  const auto [it, is_new] = rows_.try_emplace(row_key_);
  if (is_new) {
    it->second.id = static_cast<std::uint32_t>(rows_.size());
    write_metadata("thread_name", it->second.id,
                   row_key_.empty() ? "other operations" : title_of(record, name));
  }
  return it->second;
}

void TimelineWriter::write_cycle(std::int64_t ns) {
  keep_within_limits();
  if (fd_ < 0) {
    ++dropped_;
    return;
  }
  begin_event("i", "CYCLE_START", kCycleRow);
  append_us(text_.append(",\"ts\":"), ns);
  text_ += ",\"s\":\"p\"";
  end_event();
  ++events_;
}

void TimelineWriter::write_data_wait(std::int64_t begin_ns, std::int64_t end_ns) {
  keep_within_limits();
  if (fd_ < 0) {
    ++dropped_;
    return;
  }
  const auto [it, is_new] = rows_.try_emplace(std::string(kDataRow));
  Row& row = it->second;
  if (is_new) {
    row.id = static_cast<std::uint32_t>(rows_.size());
    write_metadata("thread_name", row.id, kDataRow);
  }
  const std::int64_t begin = std::max(begin_ns, row.end_ns);
  row.end_ns = std::max(end_ns, begin);
  begin_event("X", "WAIT_FOR_DATA", row.id);
  append_us(text_.append(",\"ts\":"), begin);
  append_us(text_.append(",\"dur\":"), row.end_ns - begin);
  end_event();
  ++events_;
}

void TimelineWriter::begin_world(std::string header, std::int64_t ns) {
  options_.header = std::move(header);
  keep_within_limits();
  if (fd_ < 0) return;
  write_header();
  begin_event("i", "NEXT_WORLD", kCycleRow);
  append_us(text_.append(",\"ts\":"), ns);
  text_.append(",\"s\":\"p\",\"args\":").append(options_.header);
  end_event();
  ++events_;
  flush();
}

void TimelineWriter::write_operation(const Record& r, const Transfer& transfer,
                                     const TickScale& scale) {
  keep_within_limits();
  if (fd_ < 0) {
    ++dropped_;
    return;
  }
  Row& row = row_of(r, scale.ns(r.times[kAtSubmit]));
  // Times that were not reached are those of the end. Each is at least the one before,
  // and what began before the row's last operation ended is cut: spans may not cross.
  std::array<std::int64_t, kMoments> at{};
  std::int64_t last = row.end_ns;
  for (std::size_t i = 0; i < kMoments; ++i) {
    last = std::max(last, scale.ns(r.times[i] != 0 ? r.times[i] : r.times[kAtEnd]));
    at[i] = last;
  }
  row.end_ns = at[kAtEnd];
  begin_span(r.kind, kNegotiate, row.id, at[kAtSubmit], at[kAtAgreement]);
  end_event();
  if (r.times[kAtAnnounce] != 0) {
    begin_span(r.kind, kWait, row.id, at[kAtAnnounce], at[kAtAgreement]);
    end_event();
  }
  if (r.times[kAtAgreement] != 0) {
    begin_span(r.kind, kQueue, row.id, at[kAtAgreement], at[kAtStart]);
    end_event();
  }
  begin_span(r.kind, kOperation, row.id, at[kAtStart], at[kAtEnd]);
  // Written out, since a second thread's work takes a core from a rank that computes.
  text_.append(",\"args\":{\"state\":\"").append(name_of(r.state));
  json::append_number(text_.append("\",\"bytes\":"), r.bytes);
  text_.append(",\"dtype\":\"").append(name_of(r.dtype));
  json::append_number(text_.append("\",\"batch\":"), r.batch);
  json::append_number(text_.append(",\"fused\":"), r.fused);
  text_ += '}';
  end_event();
  if (transfer.begin != 0 && r.times[kAtStart] != 0) {
    const std::int64_t begin = std::clamp(scale.ns(transfer.begin), at[kAtStart], at[kAtEnd]);
    const std::int64_t end = std::clamp(scale.ns(transfer.end), begin, at[kAtEnd]);
    begin_span(r.kind, kTransport, row.id, begin, end);
    const auto waited = scale.length_ns(static_cast<std::int64_t>(transfer.waited));
    append_us(text_.append(",\"args\":{\"waited_us\":"), std::min(waited, end - begin));
    text_ += '}';
    end_event();
  }
}

}  // namespace polyhvd
