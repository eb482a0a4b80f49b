#include "common/base/json.h"

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxQuotedKeyBytes = 100;

// Keys are valid UTF-8 here: the lexer has checked them.
std::string QuoteKey(const std::string& key) {
  if (key.size() <= kMaxQuotedKeyBytes) return absl::StrCat("\"", key, "\"");
  size_t end = kMaxQuotedKeyBytes;
  while (end > 0 && (static_cast<unsigned char>(key[end]) & 0xC0) == 0x80) --end;
  return absl::StrCat("\"", key.substr(0, end), "...\"");
}

// Passes events on to `next`, and stops at what strictness forbids but nlohmann's parser allows.
class StrictHandler : public nlohmann::json_sax<Json> {
 public:
  explicit StrictHandler(nlohmann::json_sax<Json>& next) : next_(next) {}

  // OK unless a fault of the text (not `next`) stopped the parse.
  const absl::Status& status() const { return status_; }

  bool null() override { return next_.null(); }
  bool boolean(bool value) override { return next_.boolean(value); }
  bool number_integer(number_integer_t value) override { return next_.number_integer(value); }
  bool number_unsigned(number_unsigned_t value) override { return next_.number_unsigned(value); }
  bool number_float(number_float_t value, const string_t& text) override { return next_.number_float(value, text); }
  bool string(string_t& value) override { return next_.string(value); }
  bool binary(binary_t& value) override { return next_.binary(value); }

  bool start_object(std::size_t size) override {
    keys_.emplace_back();
    return Descend() && next_.start_object(size);
  }
  bool key(string_t& value) override {
    if (!keys_.back().insert(value).second) {
      return Refuse(absl::StrCat("the key ", QuoteKey(value), " is there twice in one object"));
    }
    return next_.key(value);
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return next_.end_object();
  }
  bool start_array(std::size_t size) override { return Descend() && next_.start_array(size); }
  bool end_array() override {
    --depth_;
    return next_.end_array();
  }

  bool parse_error(std::size_t position, const std::string& /*last_token*/, const Json::exception& error) override {
    return Refuse(absl::StrCat("at byte ", position, ": ", Explanation(error.what())));
  }

 private:
  // "[json.exception.parse_error.101] parse error at line 1, column 2: <cause>; last read: '<raw bytes>'". Only the
  // cause is kept: the raw bytes may be long and need not be UTF-8.
  static std::string Explanation(const std::string& what) {
    std::string text = what.substr(0, what.find("; last read"));
    if (const size_t cause = text.find(": "); cause != std::string::npos) text = text.substr(cause + 2);
    if (const size_t bracket = text.find("] "); text[0] == '[' && bracket != std::string::npos) {
      text = text.substr(bracket + 2);
    }
    if (const size_t raw = text.find("overflow parsing '"); raw != std::string::npos) text = text.substr(0, raw + 8);
    return text;
  }

  bool Descend() {
    if (++depth_ <= kMaxJsonDepth) return true;
    return Refuse(absl::StrCat("it nests deeper than ", kMaxJsonDepth, " levels"));
  }

  bool Refuse(const std::string& cause) {
    status_ = absl::InvalidArgumentError(cause);
    return false;
  }

  nlohmann::json_sax<Json>& next_;
  absl::Status status_;
  int depth_ = 0;
  // One set for each open object. Its hash is seeded per process, so that hostile keys cannot be made to collide.
  std::vector<absl::flat_hash_set<std::string>> keys_;
};

// Builds the document. Depth is bounded by StrictHandler.
class DocumentBuilder : public nlohmann::json_sax<Json> {
 public:
  Json Take() { return std::move(root_); }

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return false; }
  bool start_object(std::size_t /*size*/) override { return Open(Json::object()); }
  bool key(string_t& value) override {
    key_ = std::move(value);
    return true;
  }
  bool end_object() override { return Close(); }
  bool start_array(std::size_t /*size*/) override { return Open(Json::array()); }
  bool end_array() override { return Close(); }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  Json* Place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }
  bool Add(Json value) {
    Place(std::move(value));
    return true;
  }
  bool Open(Json container) {
    open_.push_back(Place(std::move(container)));
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  Json root_;
  std::string key_;
  std::vector<Json*> open_;  // a container does not move while one inside it is open
};

// What nlohmann's lexer lets pass or takes for the end of the text.
absl::Status CheckRawBytes(std::string_view text) {
  if (text.substr(0, 3) == "\xEF\xBB\xBF") return absl::InvalidArgumentError("it starts with a byte-order mark");
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat("at byte ", nul, ": there is a NUL byte"));
  }
  return absl::OkStatus();
}

absl::Status CheckCanonical(const Json& value, int depth) {
  if (depth > kMaxJsonDepth) return absl::InvalidArgumentError("a value nests too deeply to have a canonical text");
  if (value.is_number_float()) return absl::InvalidArgumentError("a floating-point value has no canonical text");
  if (value.is_binary() || value.is_discarded()) return absl::InvalidArgumentError("a value is not JSON");
  if (value.is_structured()) {
    for (const Json& child : value) RETURN_IF_ERROR(CheckCanonical(child, depth + 1));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseStrictJsonSax(std::string_view text, nlohmann::json_sax<Json>& handler) {
  RETURN_IF_ERROR(CheckRawBytes(text));
  StrictHandler strict(handler);
  const bool done = Json::sax_parse(text.begin(), text.end(), &strict, Json::input_format_t::json, /*strict=*/true);
  RETURN_IF_ERROR(strict.status());
  return done ? absl::OkStatus() : absl::CancelledError("the handler stopped the parse");
}

absl::StatusOr<Json> ParseStrictJson(std::string_view text) {
  DocumentBuilder builder;
  RETURN_IF_ERROR(ParseStrictJsonSax(text, builder));
  return builder.Take();
}

absl::StatusOr<std::string> CanonicalJson(const Json& value) {
  RETURN_IF_ERROR(CheckCanonical(value, 1));
  try {
    return value.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::strict);
  } catch (const Json::exception&) {
    return absl::InvalidArgumentError("a string is not valid UTF-8, so the value has no canonical text");
  }
}

}  // namespace weightbroker
