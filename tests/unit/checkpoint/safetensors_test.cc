#include "common/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::FaultyFileSystem;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::RawSafetensors;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

std::string U8(const std::string& name, int64_t begin, int64_t end) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"U8\",\"shape\":[", end - begin, "],\"data_offsets\":[", begin, ",",
                      end, "]}");
}

absl::StatusOr<SafetensorsHeader> Parse(const std::string& json, int64_t data_bytes) {
  return ParseSafetensorsHeader(json, data_bytes, "f.safetensors");
}

// One tensor "a" with these three fields.
absl::StatusOr<SafetensorsHeader> ParseFields(const std::string& dtype, const std::string& shape,
                                              const std::string& offsets, int64_t data_bytes) {
  return Parse(absl::StrCat(R"({"a":{"dtype":)", dtype, R"(,"shape":)", shape, R"(,"data_offsets":)", offsets, "}}"),
               data_bytes);
}

std::vector<std::string> Names(const SafetensorsHeader& header) {
  std::vector<std::string> names;
  for (const auto& tensor : header.tensors) names.push_back(tensor.name);
  return names;
}

class SafetensorsFile : public ::testing::Test {
 protected:
  absl::StatusOr<SafetensorsHeader> Read(const std::string& bytes) {
    WriteFile(path_, bytes);
    auto file = files_.Open(path_, ReadMode::kBuffered);
    return file.ok() ? ReadSafetensorsHeader(**file, "m.safetensors") : file.status();
  }

  const TemporaryFolder dir_;
  const std::string path_ = dir_ / "m.safetensors";
  FaultyFileSystem files_{RealFileSystem()};
};

TEST(SafetensorsHeader, GivesTensorsInTheOrderOfTheirData) {
  const auto header = Parse(absl::StrCat("{", U8("z", 0, 4), ",", U8("a", 4, 10), "}"), 10);

  ASSERT_THAT(header, IsOk());
  EXPECT_THAT(Names(*header), ElementsAre("z", "a"));
  EXPECT_EQ(header->tensors[1].begin_bytes, 4);
  EXPECT_EQ(header->tensors[1].size_bytes(), 6);
  EXPECT_EQ(header->tensors[1].dtype->name, "U8");
  EXPECT_THAT(header->tensors[1].shape, ElementsAre(6));
  EXPECT_EQ(header->data_size_bytes, 10);
}

TEST(SafetensorsHeader, GivesMetadataAndTakesNullForNone) {
  EXPECT_THAT(Parse(R"({"__metadata__":{"format":"pt"}})", 0)->metadata, ElementsAre(Pair("format", "pt")));
  EXPECT_THAT(Parse(R"({"__metadata__":null})", 0)->metadata, IsEmpty());
}

TEST(SafetensorsHeader, RefusesMetadataThatIsNotStrings) {
  for (const char* value : {"1", "\"x\"", "[]", "{\"a\":1}", "{\"a\":null}", "{\"a\":{}}", "{\"a\":[]}", "true"}) {
    EXPECT_THAT(Parse(absl::StrCat("{\"__metadata__\":", value, "}"), 0),
                StatusIs(Reason::kCheckpointMalformed, HasSubstr("__metadata__")))
        << value;
  }
}

TEST(SafetensorsHeader, LetsExtraFieldsHoldAnything) {
  for (const char* value : {"1", "\"x\"", "null", "true", "-1.5", "[[1],{\"a\":[]}]", "{\"dtype\":{\"shape\":[]}}"}) {
    EXPECT_THAT(Parse(absl::StrCat(R"({"a":{"x":)", value, R"(,"dtype":"U8","shape":[4],"data_offsets":[0,4]}})"), 4),
                IsOk())
        << value;
  }
}

TEST(SafetensorsHeader, RefusesAHoleBetweenTensorsNamingBoth) {
  const auto header = Parse(absl::StrCat("{", U8("a", 0, 4), ",", U8("b", 8, 12), "}"), 12);

  EXPECT_THAT(header, StatusIs(Reason::kCheckpointMalformed, AllOf(HasSubstr("f.safetensors"), HasSubstr("\"a\""),
                                                                   HasSubstr("\"b\""), HasSubstr("the 4 bytes"))));
  EXPECT_THAT(header, HasMetadata("tensor", "b"));
  EXPECT_THAT(header, HasMetadata("other_tensor", "a"));
  EXPECT_THAT(header, HasMetadata("expected_bytes", "4"));
  EXPECT_THAT(header, HasMetadata("found_bytes", "8"));
}

TEST(SafetensorsHeader, RefusesAHoleBeforeTheFirstTensor) {
  EXPECT_THAT(Parse(absl::StrCat("{", U8("a", 2, 4), "}"), 4),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("is the first")));
}

TEST(SafetensorsHeader, RefusesAnOverlapNamingBoth) {
  EXPECT_THAT(Parse(absl::StrCat("{", U8("a", 0, 4), ",", U8("b", 2, 6), "}"), 6),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("overlap by 2 bytes")));
}

TEST(SafetensorsHeader, RefusesTwoNamesForOneRange) {
  EXPECT_THAT(Parse(absl::StrCat("{", U8("a", 0, 4), ",", U8("b", 0, 4), "}"), 4),
              StatusIs(Reason::kCheckpointMalformed));
}

TEST(SafetensorsHeader, AllowsEmptyTensorsBetweenOthersButNotInside) {
  EXPECT_THAT(
      Parse(absl::StrCat("{", U8("a", 0, 4), ",", U8("e", 4, 4), ",", U8("d", 4, 4), ",", U8("b", 4, 6), "}"), 6),
      IsOk());
  EXPECT_THAT(Parse(absl::StrCat("{", U8("a", 0, 4), ",", U8("e", 2, 2), "}"), 4),
              StatusIs(Reason::kCheckpointMalformed));
}

TEST(SafetensorsHeader, RefusesBytesThatBelongToNoTensor) {
  EXPECT_THAT(Parse(absl::StrCat("{", U8("a", 0, 4), "}"), 9),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("5 bytes at the end")));
  EXPECT_THAT(Parse("{}", 16), StatusIs(Reason::kCheckpointMalformed, HasSubstr("16 bytes at the end")));
}

TEST(SafetensorsHeader, SaysTruncatedForDataThatIsNotThere) {
  const auto header = Parse(absl::StrCat("{", U8("a", 0, 4), "}"), 3);
  EXPECT_THAT(header, StatusIs(Reason::kCheckpointTruncated, HasSubstr("tensor \"a\" ends at byte 4")));
  EXPECT_THAT(header, HasMetadata("found_bytes", "3"));
}

TEST(SafetensorsHeader, TakesOnlyPlainIntegersForShapesAndOffsets) {
  for (const char* number :
       {"-0", "4.0", "4e0", "1e2", "-4", "18446744073709551616", "9223372036854775808", "\"4\"", "null", "[4]"}) {
    EXPECT_THAT(ParseFields("\"U8\"", absl::StrCat("[", number, "]"), "[0,4]", 4),
                StatusIs(Reason::kCheckpointMalformed, HasSubstr("in its shape")))
        << number;
    EXPECT_THAT(ParseFields("\"U8\"", "[4]", absl::StrCat("[0,", number, "]"), 4),
                StatusIs(Reason::kCheckpointMalformed, HasSubstr("in its data_offsets")))
        << number;
  }
}

TEST(SafetensorsHeader, NeverOverflowsWhateverTheShape) {
  for (const char* shape :
       {"[4294967296,4294967296]", "[9223372036854775807,2]", "[9223372036854775807,9223372036854775807,4]",
        "[2305843009213693952]", "[0,9223372036854775807,4]", "[9223372036854775807,4,0]"}) {
    EXPECT_THAT(ParseFields("\"I32\"", shape, "[0,0]", 0),
                StatusIs(Reason::kCheckpointMalformed, HasSubstr("below 2^60")))
        << shape;
  }
  EXPECT_THAT(ParseFields("\"I32\"", "[0,1073741824,4]", "[0,0]", 0), IsOk());
  EXPECT_THAT(ParseFields("\"I32\"", "[1073741824,4,0]", "[0,0]", 0), IsOk());
}

TEST(SafetensorsHeader, RefusesASizeThatTypeAndShapeDoNotGive) {
  const auto header = ParseFields("\"I32\"", "[2,2]", "[0,4]", 4);
  EXPECT_THAT(header, StatusIs(Reason::kCheckpointMalformed, HasSubstr("I32 [2, 2], which takes 16 bytes")));
  EXPECT_THAT(header, HasMetadata("expected_bytes", "16"));
  EXPECT_THAT(ParseFields("\"F32\"", "[]", "[0,0]", 0), StatusIs(Reason::kCheckpointMalformed));
  EXPECT_THAT(ParseFields("\"F32\"", "[]", "[0,4]", 4), IsOk());
}

TEST(SafetensorsHeader, CountsTypesOfLessThanAByteInBits) {
  EXPECT_THAT(ParseFields("\"F4\"", "[8]", "[0,4]", 4), IsOk());
  EXPECT_THAT(ParseFields("\"F6_E3M2\"", "[4]", "[0,3]", 3), IsOk());
  EXPECT_THAT(ParseFields("\"F4\"", "[3]", "[0,2]", 2),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("no whole number of bytes")));
}

TEST(SafetensorsHeader, RefusesAnUnknownTypeNamingIt) {
  const auto header = ParseFields("\"I4\"", "[4]", "[0,4]", 4);
  EXPECT_THAT(header, StatusIs(Reason::kCheckpointMalformed, AllOf(HasSubstr("\"I4\""), HasSubstr("BF16"))));
  EXPECT_THAT(header, HasMetadata("dtype", "I4"));
  EXPECT_THAT(ParseFields("3", "[4]", "[0,4]", 4), StatusIs(Reason::kCheckpointMalformed));
}

TEST(SafetensorsHeader, RefusesMissingFields) {
  for (const char* fields : {R"("dtype":"U8","shape":[4])", R"("dtype":"U8","data_offsets":[0,4])",
                             R"("shape":[4],"data_offsets":[0,4])", ""}) {
    EXPECT_THAT(Parse(absl::StrCat("{\"a\":{", fields, "}}"), 4),
                StatusIs(Reason::kCheckpointMalformed, HasSubstr("has no ")))
        << fields;
  }
}

TEST(SafetensorsHeader, RefusesOtherThanTwoOffsets) {
  for (const char* offsets : {"[]", "[0]", "[0,4,4]"}) {
    EXPECT_THAT(ParseFields("\"U8\"", "[4]", offsets, 4),
                StatusIs(Reason::kCheckpointMalformed, HasSubstr("data_offsets")))
        << offsets;
  }
  EXPECT_THAT(ParseFields("\"U8\"", "[4]", "[4,0]", 4),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("before it begins")));
}

TEST(SafetensorsHeader, AllowsSixtyFourDimensionsAndNoMore) {
  std::string ones = "1";
  for (int i = 1; i < kMaxRank; ++i) ones += ",1";
  EXPECT_THAT(ParseFields("\"U8\"", absl::StrCat("[", ones, "]"), "[0,1]", 1), IsOk());
  EXPECT_THAT(ParseFields("\"U8\"", absl::StrCat("[", ones, ",1]"), "[0,1]", 1),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("more than 64 dimensions")));
}

TEST(SafetensorsHeader, RefusesATensorThatIsNoObject) {
  for (const char* value : {"null", "1", "\"x\"", "[\"U8\",[4],[0,4]]", "true"}) {
    EXPECT_THAT(Parse(absl::StrCat("{\"a\":", value, "}"), 4),
                StatusIs(Reason::kCheckpointMalformed, HasSubstr("must be there")))
        << value;
  }
}

TEST(SafetensorsHeader, RefusesDuplicateNamesAlsoWhenTheyAreSpeltDifferently) {
  EXPECT_THAT(Parse(absl::StrCat("{", U8("a", 0, 4), ",", U8("\\u0061", 0, 4), "}"), 4),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("\"a\" is there twice")));
}

TEST(SafetensorsHeader, RefusesANulInANameAndShowsItEscaped) {
  EXPECT_THAT(Parse(absl::StrCat("{", U8("a\\u0000b", 0, 4), "}"), 4),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("a\\x00b")));
}

TEST(SafetensorsHeader, MustBeginWithABrace) {
  EXPECT_THAT(Parse(" {}", 0), StatusIs(Reason::kCheckpointMalformed, HasSubstr("begin with {")));
  EXPECT_THAT(Parse("null", 0), StatusIs(Reason::kCheckpointMalformed));
  EXPECT_THAT(Parse("", 0), StatusIs(Reason::kCheckpointMalformed));
}

TEST(SafetensorsHeader, KeepsErrorsShortWhateverTheNames) {
  const std::string name(1'000'000, 'n');
  const auto header = Parse(absl::StrCat("{", U8(name, 4, 8), "}"), 8);
  EXPECT_LT(header.status().message().size(), 1000u);
  EXPECT_LT(GetErrorDetails(header.status()).metadata.at("tensor").size(), 300u);
}

TEST_F(SafetensorsFile, ReadsWhatTheBuilderWrites) {
  const auto header =
      Read(CheckpointBuilder().Tensor("w", "BF16", {2, 3}).Tensor("b", "F32", {}).Metadata("format", "pt").FileBytes());

  ASSERT_THAT(header, IsOk());
  EXPECT_THAT(Names(*header), ElementsAre("w", "b"));
  EXPECT_EQ(header->data_size_bytes, 16);
  EXPECT_EQ(RealFileSystem().Stat(path_)->size_bytes, header->data_offset_bytes + 16);
}

TEST_F(SafetensorsFile, AllowsWhiteSpaceAfterTheHeader) { EXPECT_THAT(Read(RawSafetensors("{} \r\n\t")), IsOk()); }

TEST_F(SafetensorsFile, SaysTruncatedForAFileShorterThanItsHeader) {
  const auto header = Read(RawSafetensors(R"({"a":1})").substr(0, 12));
  EXPECT_THAT(header,
              StatusIs(Reason::kCheckpointTruncated, HasSubstr("the header ends at byte 15 but the file has 12")));
  EXPECT_THAT(Read(""), StatusIs(Reason::kCheckpointTruncated, HasSubstr("has 0 bytes")));
  EXPECT_THAT(Read(std::string(9, '\0')), StatusIs(Reason::kCheckpointTruncated));
}

TEST_F(SafetensorsFile, RefusesAHeaderOverTheLimitWithoutReadingIt) {
  std::string bytes = RawSafetensors("{}");
  bytes[3] = '\x06';  // 100,663,298
  EXPECT_THAT(Read(bytes), StatusIs(Reason::kCheckpointTooLarge, HasSubstr("100000000")));
  bytes[7] = '\xff';
  EXPECT_THAT(Read(bytes), StatusIs(Reason::kCheckpointTooLarge));
}

TEST_F(SafetensorsFile, RefusesALengthTooShortForAHeader) {
  EXPECT_THAT(Read(std::string(24, '\0')), StatusIs(Reason::kCheckpointMalformed, HasSubstr("length of 0")));
}

TEST_F(SafetensorsFile, SaysWhatAFileIsThatIsNoSafetensors) {
  EXPECT_THAT(Read("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"),
              StatusIs(Reason::kCheckpointNotSafetensors, HasSubstr("m.safetensors: is a Git LFS pointer")));
  EXPECT_THAT(Read("<!DOCTYPE html><html></html>"), StatusIs(Reason::kCheckpointNotSafetensors, HasSubstr("HTML")));
  EXPECT_THAT(Read("PK\x03\x04" + std::string(100, '\0')),
              StatusIs(Reason::kCheckpointNotSafetensors, HasSubstr("zip")));
  EXPECT_THAT(Read("\x80\x02" + std::string(100, '\0')),
              StatusIs(Reason::kCheckpointNotSafetensors, HasSubstr("pickle")));
  EXPECT_THAT(Read("oops"), StatusIs(Reason::kCheckpointTruncated));
}

TEST_F(SafetensorsFile, FailsClearlyWhenTheFileIsCutWhileItIsRead) {
  files_.BeforeRead("m.safetensors", 2, [this] { WriteFile(path_, "x"); });
  const std::string bytes = CheckpointBuilder().Tensor("a", "U8", {4}).FileBytes();
  EXPECT_THAT(Read(bytes), StatusIs(Reason::kCheckpointTruncated, HasSubstr("m.safetensors")));
}

TEST_F(SafetensorsFile, ReadsAHeaderInSmallPieces) {
  files_.ShortenReads(7);
  EXPECT_THAT(Read(CheckpointBuilder().Tensor("a", "U8", {4}).FileBytes()), IsOk());
}

TEST_F(SafetensorsFile, PassesAReadErrorOn) {
  files_.FailRead("m.safetensors", 2);
  EXPECT_THAT(Read(CheckpointBuilder().Tensor("a", "U8", {4}).FileBytes()), StatusIs(Reason::kSystemError));
}

}  // namespace
}  // namespace weightbroker
