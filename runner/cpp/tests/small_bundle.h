// A bundle of a few kilobytes, made without the code under test, to be read, broken and mutated.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace mctl {

using Members = std::vector<std::pair<std::string, std::string>>;  // name with the top folder, data

// A zip of stored members, the data of each on a 64-byte boundary. `edit` may change the records before they are
// joined: "local NAME", "central NAME" and "end".
std::string zip_of(const Members& members,
                   const std::map<std::string, std::pair<std::size_t, std::string>>& edits = {});

// header + data: `header` is the JSON, padded here so that the data starts on a 64-byte boundary.
std::string safetensors_of(std::string header, const std::string& data);

std::string small_manifest(const Members& others);  // of the bundle with these members beside the manifest
Members small_members();                            // weights, one golden case, a library that is none, the manifest
int file_of(const std::string& bytes);              // a descriptor; the caller closes it

}  // namespace mctl
