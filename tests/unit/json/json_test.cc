#include "common/base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::weightbroker::testing::IsOk;

std::string Fault(std::string_view text) {
  const auto result = ParseStrictJson(text);
  if (result.ok()) return "accepted";
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(result.status().message());
}

std::string Nested(int depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(StrictJson, BuildsTheWholeDocument) {
  const auto json = ParseStrictJson(R"( {"a": [1, -2, 2.5, "x", true, null, {"b": {}}], "c": []} )");

  ASSERT_THAT(json, IsOk());
  EXPECT_EQ(json->dump(), R"({"a":[1,-2,2.5,"x",true,null,{"b":{}}],"c":[]})");
}

TEST(StrictJson, AcceptsAScalarAtTheTop) { EXPECT_EQ(*ParseStrictJson("17"), 17); }

TEST(StrictJson, RefusesDuplicateKeysAtEveryLevel) {
  EXPECT_THAT(Fault(R"({"a": 1, "a": 1})"), HasSubstr("\"a\" is there twice"));
  EXPECT_THAT(Fault(R"([{"x": {"a": 1, "b": 2, "a": 3}}])"), HasSubstr("\"a\" is there twice"));
}

TEST(StrictJson, SeesThatAnEscapedKeyIsTheSameKey) {
  EXPECT_THAT(Fault(R"({"a": 1, "\u0061": 2})"), HasSubstr("\"a\" is there twice"));
}

TEST(StrictJson, AllowsTheSameKeyInDifferentObjects) {
  EXPECT_THAT(ParseStrictJson(R"({"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]})"), IsOk());
}

TEST(StrictJson, RefusesNulPaddingWhichTheParserUnderneathTakesForTheEnd) {
  EXPECT_THAT(Fault(std::string_view("{}\0\0", 4)), HasSubstr("NUL"));
  EXPECT_THAT(Fault(std::string_view("\0{}", 3)), HasSubstr("NUL"));
}

TEST(StrictJson, RefusesWhatFollowsTheValue) {
  EXPECT_THAT(Fault("{}{}"), HasSubstr("at byte 3"));
  EXPECT_THAT(Fault("{} x"), Not("accepted"));
}

TEST(StrictJson, RefusesAByteOrderMark) { EXPECT_THAT(Fault("\xEF\xBB\xBF{}"), HasSubstr("byte-order mark")); }

TEST(StrictJson, RefusesWhatIsNoJson) {
  for (const char* text :
       {"", " ", "{", "[1,]", "{\"a\":1,}", "/*x*/1", "NaN", "Infinity", "01", "+1", "1.", "'a'", "\"\t\"", "tru"}) {
    EXPECT_THAT(Fault(text), Not("accepted")) << text;
  }
}

TEST(StrictJson, RefusesStringsThatAreNotUtf8) {
  EXPECT_THAT(Fault("\"\xff\""), Not("accepted"));
  EXPECT_THAT(Fault("\"\xed\xa0\x80\""), Not("accepted"));  // a surrogate in UTF-8
  EXPECT_THAT(Fault("\"\xc0\x80\""), Not("accepted"));      // an overlong NUL
}

TEST(StrictJson, RefusesLoneSurrogates) {
  EXPECT_THAT(Fault(R"("\ud800")"), HasSubstr("surrogate"));
  EXPECT_THAT(Fault(R"("\udc00")"), HasSubstr("surrogate"));
  EXPECT_THAT(Fault(R"("\ud800\ud800")"), HasSubstr("surrogate"));
}

TEST(StrictJson, RefusesNumbersThatOverflow) { EXPECT_EQ(Fault("[1e999]"), "at byte 6: number overflow"); }

TEST(StrictJson, RefusesDeepNestingAndSaysHowDeep) {
  EXPECT_THAT(ParseStrictJson(Nested(kMaxJsonDepth)), IsOk());
  EXPECT_THAT(Fault(Nested(kMaxJsonDepth + 1)), HasSubstr("deeper than 64"));
  EXPECT_THAT(Fault(std::string(1'000'000, '[')), HasSubstr("deeper than 64"));
}

TEST(StrictJson, KeepsMessagesFreeOfWhatTheTextHolds) {
  const std::string fault = Fault("[\"" + std::string(100'000, 'x') + "\xff");

  EXPECT_LT(fault.size(), 200u);
  EXPECT_THAT(fault, Not(HasSubstr("\xff")));
}

TEST(StrictJson, CutsALongKeyInAMessageAtACharacter) {
  std::string key(99, 'k');
  key += "\xc3\xa9\xc3\xa9";
  EXPECT_EQ(Fault("{\"" + key + "\":1,\"" + key + "\":1}"),
            "the key \"" + key.substr(0, 99) + "...\" is there twice in one object");
}

class StopAtFirstString : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return false; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override { return false; }
};

TEST(StrictJsonSax, SaysCancelledWhenTheHandlerStops) {
  StopAtFirstString handler;
  EXPECT_EQ(ParseStrictJsonSax(R"([1, "x", 2])", handler).code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(ParseStrictJsonSax("[1, 2]", handler), IsOk());
}

TEST(CanonicalJson, SortsKeysAndEscapesOnlyWhatMustBe) {
  const auto json =
      ParseStrictJson(R"({"b": "\u00e9\/\u0001\n", "a": [1, -2, true, null], "A": 18446744073709551615})");

  EXPECT_EQ(*CanonicalJson(*json), "{\"A\":18446744073709551615,\"a\":[1,-2,true,null],\"b\":\"\xc3\xa9/\\u0001\\n\"}");
}

TEST(CanonicalJson, RefusesFloatsAndBrokenStrings) {
  EXPECT_EQ(CanonicalJson({{"a", 1.5}}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CanonicalJson("\xff").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace weightbroker
