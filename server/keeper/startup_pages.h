// What only the start needs need not stay in memory.
#pragma once

namespace weightbroker {

// Gives back the pages of code and constants that have been used so far, of this program and of its libraries. The
// kernel brings back those that are used again. Reading flags and the configuration file touches more code than the
// keeper ever runs afterwards. Call it when that is done. Thread-safe.
void ForgetStartupPages();

}  // namespace weightbroker
