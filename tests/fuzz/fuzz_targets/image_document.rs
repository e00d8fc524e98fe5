//! See `loligo_tests::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| (loligo_tests::fuzz::target("image_document").run)(data));
