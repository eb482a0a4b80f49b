// Marks what stays visible when the library, which is built with hidden visibility, ends up in an engine's shared
// object.
#pragma once

#define WEIGHTBROKER_EXPORT [[gnu::visibility("default")]]
