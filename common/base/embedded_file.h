// A file of the source tree that a program carries with it, put there by weightbroker_embed_files (cmake).
#pragma once

namespace weightbroker {

struct EmbeddedFile {
  const char* label;  // its name
  const char* text;
};

}  // namespace weightbroker
