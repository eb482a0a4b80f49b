// In which form Log writes its lines: logfmt, or one JSON object a line.
//
//   SetLogFormat(LogFormat::kJson);       // before there are threads
//
// Programs that this one starts write the same: the form is in the environment (WEIGHTBROKER_LOG_FORMAT), where a
// process finds it at its first line.
#pragma once

#include <string>
#include <string_view>

#include "common/base/log.h"

namespace weightbroker {

enum class LogFormat { kText, kJson };

void SetLogFormat(LogFormat format);

// The line that Log would write in JSON, without the newline: `time`, `level`, `program`, `pid`, `event`, then the
// fields, all strings but `pid`. A field that is named as one of those gets a '_' behind its name.
std::string FormatJsonLogLine(std::string_view time, LogLevel level, std::string_view event, const LogFields& fields);

}  // namespace weightbroker
