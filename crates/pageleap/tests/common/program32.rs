//! A program of 32 bits, made by hand: no compiler for it has to be there.

use std::io::{Read, Write};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Where the program lies, and the memory that it touches.
const BASE: u32 = 0x0804_8000;
pub const TOUCHED: Range<usize> = 0x0804_a000..0x0805_a000;

/// The program for x86: it touches its memory, writes a byte to its standard output, and sleeps.
fn program() -> Vec<u8> {
    const HEADERS: u32 = 0x54;
    let pages = (TOUCHED.len() / 4096) as u32;
    let mut code = Vec::new();
    let mut put = |opcode: &[u8], operand: Option<u32>| {
        code.extend(opcode);
        code.extend(operand.map(u32::to_le_bytes).into_iter().flatten());
    };
    put(&[0xbf], Some(TOUCHED.start as u32)); // mov edi, memory
    put(&[0xb9], Some(pages)); // mov ecx, pages
    put(&[0xc6, 0x07, 0x01], None); // touch: mov byte [edi], 1
    put(&[0x81, 0xc7], Some(4096)); // add edi, 4096
    put(&[0xe2, 0xf5], None); // loop touch
    put(&[0xb8], Some(4)); // mov eax, write
    put(&[0xbb], Some(1)); // mov ebx, 1
    put(&[0xb9], Some(BASE)); // mov ecx, the beginning of the program
    put(&[0xba], Some(1)); // mov edx, 1
    put(&[0xcd, 0x80], None); // int 0x80
    put(&[0xb8], Some(29)); // sleep: mov eax, pause
    put(&[0xcd, 0x80], None); // int 0x80
    put(&[0xeb, 0xf7], None); // jmp sleep
    let file_bytes = HEADERS + code.len() as u32;
    let mut file = b"\x7fELF\x01\x01\x01".to_vec();
    file.resize(16, 0);
    // An executable file for x86, with one program header behind this one and no sections.
    let halves = |file: &mut Vec<u8>, all: &[u16]| {
        all.iter().for_each(|half| file.extend(half.to_le_bytes()));
    };
    let words = |file: &mut Vec<u8>, all: &[u32]| {
        all.iter().for_each(|word| file.extend(word.to_le_bytes()));
    };
    halves(&mut file, &[2, 3]);
    words(&mut file, &[1, BASE + HEADERS, 52, 0, 0]);
    halves(&mut file, &[52, 32, 1, 0, 0, 0]);
    // All of the file, and zeros up to the end of the memory, to be read, written and executed.
    words(&mut file, &[1, 0, BASE, BASE, file_bytes, TOUCHED.end as u32 - BASE, 7, 4096]);
    assert_eq!(file.len(), HEADERS as usize);
    file.extend(code);
    file
}

/// Starts it, and waits until it has touched its memory. The caller has to end it.
///
/// # Errors
/// The kernel runs no such programs.
pub fn start(directory: &Path) -> std::io::Result<Child> {
    let path = directory.join("program32");
    // A shell writes it: a file that this process, or a child that it forks meanwhile, has open for
    // writing cannot be executed.
    let mut writer = Command::new("/bin/sh");
    writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(&path).stdin(Stdio::piped());
    let mut writer = writer.spawn()?;
    writer.stdin.take().unwrap().write_all(&program())?;
    assert!(writer.wait()?.success());
    let mut child = Command::new(&path).stdout(Stdio::piped()).spawn()?;
    let mut byte = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut byte)?;
    assert_eq!(byte, [0x7f]);
    Ok(child)
}
