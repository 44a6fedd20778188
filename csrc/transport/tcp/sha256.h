// SHA-256 and HMAC (FIPS 180-4, RFC 2104), with which ranks prove that they belong. Neither torch
// nor the standard library has them for C++, Python's cannot be called on the thread that needs
// them, and OpenSSL would be a dependency for these few lines.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace pipecomm {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> bytes);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);

}  // namespace pipecomm
